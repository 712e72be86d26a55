"""What the BFCL environment takes from the `bfcl-eval` wheel: simulated APIs and the official checker."""
