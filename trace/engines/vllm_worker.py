"""The vLLM engine process: one per rank, started by `vllm_engine.VllmEngine`.

It talks over one socket: requests in, completions out as soon as each is done, while vLLM's
continuous batching advances all of them together.
"""

from __future__ import annotations

import os
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any


def _start(options: dict[str, Any]) -> Any:
    from vllm import LLM

    return LLM(
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",
        disable_log_stats=False,
        generation_config="vllm",  # a model's own top_p or top_k would bias the ratios
        **options,
    )


def _add(llm: Any, key: int, prefix_ids: list[int], sampling: dict[str, Any], version: int) -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    stop = list(sampling["stop"])
    params = SamplingParams(
        temperature=sampling["temperature"],
        max_tokens=sampling["max_tokens"],
        seed=sampling["seed"],
        stop=stop or None,
        include_stop_str_in_output=bool(stop),
        skip_special_tokens=False,
        detokenize=bool(stop),
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        logprobs=0,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    # vLLM does not forget cached prefixes when weights change: the salt makes old ones unreachable.
    prompt = {"prompt_token_ids": prefix_ids, "cache_salt": f"v{version}"}
    llm.llm_engine.add_request(str(key), prompt, params)


def _completion(output: Any) -> dict[str, Any]:
    sampled = output.outputs[0]
    ids = list(sampled.token_ids)
    return {
        "token_ids": ids,
        "logprobs": [entry[token].logprob for entry, token in zip(sampled.logprobs, ids, strict=True)],
        "truncated": sampled.finish_reason == "length",
        "cached_tokens": output.num_cached_tokens or 0,
    }


def _repack_tied_head(worker: Any) -> None:
    """vLLM on CPU packs the output head's weight apart; after a reload a tied head would stay stale."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    model = worker.model_runner.get_model()
    head = getattr(model, "lm_head", None)
    if head is not None and getattr(model.config, "tie_word_embeddings", False):
        head.weight = model.model.embed_tokens.weight
        dispatch_cpu_unquantized_gemm(head, remove_weight=False)


def _load(llm: Any, path: str, asleep: bool) -> None:
    from vllm.platforms import current_platform

    if asleep:
        llm.wake_up(tags=["weights"])  # order matters: weights, load, then the KV cache
    llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
    if current_platform.is_cpu():
        llm.collective_rpc(_repack_tied_head)
    if asleep:
        llm.wake_up(tags=["kv_cache"])
    if not llm.reset_prefix_cache():
        raise RuntimeError("vLLM refused to reset its prefix cache: a request is still running")


def _counters(llm: Any) -> dict[str, int]:
    names = {
        "vllm:prompt_tokens": "prompt_tokens",
        "vllm:prefix_cache_hits": "cached_tokens",
        "vllm:generation_tokens": "generated_tokens",
    }
    return {names[m.name]: int(m.value) for m in llm.get_metrics() if m.name in names}


def serve(connection: Connection, options: dict[str, Any]) -> None:
    """Answer requests until told to close or the trainer is gone."""
    llm = _start(options)
    connection.send(("ready", None))
    engine, version, asleep = llm.llm_engine, 0, False
    while True:
        busy = engine.has_unfinished_requests()
        while connection.poll(0 if busy else None):
            name, payload = connection.recv()
            if name == "generate":
                key, prefix_ids, sampling = payload
                try:
                    _add(llm, key, prefix_ids, sampling, version)
                except Exception as error:
                    connection.send(("refused", (key, str(error))))
            elif name == "abort":
                engine.abort_request([str(payload)])
            elif name == "load":
                path, version = payload
                _load(llm, path, asleep)
                asleep = False
                connection.send(("loaded", version))
            elif name == "sleep":
                llm.sleep(level=2)  # the next load brings the weights anyway
                asleep = True
                connection.send(("asleep", None))
            elif name == "counters":
                connection.send(("counters", _counters(llm)))
            elif name == "close":
                return
            busy = True
        for output in engine.step() if engine.has_unfinished_requests() else ():
            if output.finished:
                connection.send(("done", (int(output.request_id), _completion(output))))


def main() -> None:
    """`python -m trace_rl.engines.vllm_worker FD`: the first message on FD holds vLLM's options."""
    connection = Connection(int(sys.argv[1]))
    try:
        serve(connection, connection.recv())
    except EOFError:
        pass  # the trainer is gone
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # vLLM's own threads must not keep a broken process alive
    os._exit(0)


if __name__ == "__main__":
    main()
