"""An index as a server that speaks `POST /retrieve` in the format of Search-R1's retrieval server."""

from __future__ import annotations

import asyncio
import json
import signal
from typing import Any

from trace_rl.tasks.task import Passage

from .contents import join_contents
from .protocol import RetrievalError, ScoredIndex
from .request import BadRequest, Limits, Retrieve, parse_request

try:
    import uvicorn
    from fastapi import FastAPI, Request, Response
    from fastapi.concurrency import run_in_threadpool
    from starlette.requests import ClientDisconnect
except ImportError as error:
    raise ImportError(
        "the retrieval server needs fastapi and uvicorn: pip install 'trace-kernels[retriever]'"
    ) from error

_GRACE_SECONDS = 10


def serve(index: ScoredIndex, *, host: str = "127.0.0.1", port: int = 8000, top_k: int = 3) -> None:
    """Serves until SIGTERM or SIGINT, then answers what has been asked (for at most 10 s) and returns.

    Args:
        index: what is searched.
        host: address to listen on; the server knows no passwords, so only trusted networks.
        port: 0 takes a free one, which the log names.
        top_k: passages a query gets that does not say how many.

    Exits with code 1, after a line in the log, if it cannot listen there.
    """
    app = create_app(index, top_k=top_k)
    config = uvicorn.Config(
        app, host=host, port=port, access_log=False, timeout_graceful_shutdown=_GRACE_SECONDS
    )
    # uvicorn hands a signal on to whoever handled it before, once it is done: that must not kill the process.
    before = {s: signal.signal(s, lambda *_: None) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        uvicorn.Server(config).run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def create_app(index: ScoredIndex, *, top_k: int = 3, limits: Limits | None = None) -> FastAPI:
    """``POST /retrieve`` and ``GET /health``; errors are ``{"detail": "a sentence"}``.

    400 for a body that is not JSON, 422 for wrong fields, 413 for one that is too large, 408 for one that does
    not arrive, 503 where the index fails. Raises ValueError for a ``top_k`` outside the limits.
    """
    limits = limits or Limits()
    if not 1 <= top_k <= limits.top_k:
        raise ValueError(f"top_k must be from 1 to {limits.top_k}, got {top_k}")
    app = FastAPI(title="trace-rl retriever", docs_url=None, redoc_url=None, openapi_url=None)

    @app.post("/retrieve")
    async def retrieve(request: Request) -> Response:
        try:
            asked = parse_request(await _body(request, limits), top_k, limits)
            return _json(200, {"result": await run_in_threadpool(_answer, index, asked)})
        except BadRequest as error:
            return _json(error.status, {"detail": str(error)})
        except RetrievalError as error:
            return _json(503, {"detail": str(error)})

    @app.get("/health")
    async def health() -> Response:
        return _json(200, {"status": "ok", "passages": len(index)})

    return app


def _answer(index: ScoredIndex, asked: Retrieve) -> list[list[dict[str, Any]]]:
    return [
        [
            {"document": _document(passage), "score": score} if asked.return_scores else _document(passage)
            for passage, score in index.scored_search(query, asked.top_k)
        ]
        for query in asked.queries
    ]


def _document(passage: Passage) -> dict[str, str]:
    return {"id": passage.id, "contents": join_contents(passage)}


async def _body(request: Request, limits: Limits) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limits.body_bytes:
                    raise BadRequest(413, f"the body is larger than {limits.body_bytes} bytes")
    except ClientDisconnect:
        raise BadRequest(400, "the client went away") from None
    except TimeoutError:
        raise BadRequest(408, f"the body did not arrive within {limits.body_seconds:g} s") from None
    return bytes(body)


def _json(status: int, data: dict[str, Any]) -> Response:
    # ASCII, as half a surrogate pair in an index's text could not be sent otherwise.
    return Response(json.dumps(data), status, media_type="application/json")
