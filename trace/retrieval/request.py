"""What `POST /retrieve` takes, checked."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


class BadRequest(ValueError):
    """A request that cannot be answered: ``status`` is 400 (not JSON) or 422 (wrong fields)."""

    def __init__(self, status: int, problem: str) -> None:
        self.status = status
        super().__init__(problem)


@dataclass(frozen=True)
class Limits:
    """Most that one request may ask for: ``passages`` counts queries times topk, ``body_seconds`` is how long
    its body may take to arrive."""

    queries: int = 1024
    top_k: int = 1000
    passages: int = 20_000
    body_bytes: int = 4 * 2**20
    body_seconds: float = 30.0


@dataclass(frozen=True)
class Retrieve:
    """One request: passages wanted for each query, with their scores or bare."""

    queries: list[str]
    top_k: int
    return_scores: bool


def parse_request(body: bytes, default_top_k: int, limits: Limits) -> Retrieve:
    """Fields as Search-R1's server has them: ``queries``, ``topk`` (missing, null or 0: the default) and
    ``return_scores`` (missing: false); others are ignored. Raises BadRequest."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(400, f"the body is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise BadRequest(422, 'the body must be an object like {"queries": ["..."], "topk": 3}')
    queries: Any = data.get("queries")
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise BadRequest(422, "queries must be a list of strings")
    if len(queries) > limits.queries:
        raise BadRequest(422, f"at most {limits.queries} queries a request, got {len(queries)}")
    top_k = data.get("topk")
    if top_k is None or top_k == 0:
        top_k = default_top_k
    if type(top_k) is not int or not 1 <= top_k <= limits.top_k:
        raise BadRequest(422, f"topk must be a whole number from 1 to {limits.top_k}")
    if len(queries) * top_k > limits.passages:
        asked = f"{len(queries)} queries with topk {top_k}"
        raise BadRequest(422, f"at most {limits.passages} passages a request, got {asked}")
    return_scores = data.get("return_scores", False)
    if type(return_scores) is not bool:
        raise BadRequest(422, "return_scores must be true or false")
    return Retrieve(queries, top_k, return_scores)
