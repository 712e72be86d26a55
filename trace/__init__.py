"""The TRACE trainer (arXiv 2606.11119). Entry: `deepspeed trace/train.py --config FILE`."""
