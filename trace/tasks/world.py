"""A small synthetic world of people, places and works, and the multi-hop questions one can ask about it.

Every fact is one passage and every relation a function, so a chain of relations from an entity has exactly
one answer: "birthplace of author of Tarn ?" is two searches and an answer away.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import chain

from .names import make_names
from .task import Passage, Task

SOURCE = "world"

# Relation -> kind of its value. Earlier relations are kept when a world has fewer per kind.
RELATIONS: dict[str, dict[str, str]] = {
    "person": {"mother": "person", "birthplace": "place", "debut": "work", "mentor": "person"},
    "place": {"mayor": "person", "twin": "place", "anthem": "work", "founder": "person"},
    "work": {"author": "person", "setting": "place", "sequel": "work", "editor": "person"},
}
_FUNCTION_WORDS = ("of", "?", "seek", "found")


@dataclass(frozen=True)
class WorldConfig:
    """Sizes of a world.

    Attributes:
        people, places, works: entities of each kind, at least 5 (relations within a kind need room).
        relations_per_kind: 2 to 4.
        min_hops, max_hops: relations in a question's chain, 1 <= min <= max.
        train_questions, test_questions: totals, spread evenly over the numbers of hops. A world too small
            for them gives both sets the same share of what there is.
        repeat_relations: whether one chain may use a relation twice. It is harder then to tell from the
            question how far one has got.
    """

    people: int = 40
    places: int = 40
    works: int = 40
    relations_per_kind: int = 4
    min_hops: int = 2
    max_hops: int = 4
    train_questions: int = 1500
    test_questions: int = 300
    repeat_relations: bool = False

    def __post_init__(self) -> None:
        if min(self.people, self.places, self.works) < 5:
            raise ValueError(f"a world needs at least 5 entities of each kind, got {self}")
        if not 2 <= self.relations_per_kind <= 4:
            raise ValueError(f"relations_per_kind must be 2, 3 or 4, got {self.relations_per_kind}")
        if not 1 <= self.min_hops <= self.max_hops:
            raise ValueError(f"need 1 <= min_hops <= max_hops, got {self.min_hops} and {self.max_hops}")
        if min(self.train_questions, self.test_questions) < 0:
            raise ValueError("numbers of questions cannot be negative")


@dataclass(frozen=True)
class World:
    """What :func:`build_world` makes.

    Attributes:
        entities: kind -> names.
        facts: (entity, relation) -> value, a name.
        passages: one per fact, the entity as title, "relation value" as text.
        train, test: tasks with disjoint (start, chain); their ids are the questions' words.
    """

    config: WorldConfig
    seed: int
    entities: dict[str, tuple[str, ...]]
    facts: dict[tuple[str, str], str]
    passages: tuple[Passage, ...]
    train: tuple[Task, ...]
    test: tuple[Task, ...]

    def hops(self, task: Task) -> int:
        """Searches the task needs: the relations in its chain."""
        return len(_parse_question(task.question)[1])

    def expert_actions(self, task: Task, *, hasty: bool = False) -> list[str]:
        """The turns that solve ``task``: one search per hop, then the answer, each with a short thought.

        A hasty expert leaves out the last search and answers with what it found before, which is wrong.

        The thought names what the last search found and the relation sought next, in words the observation
        and the question hold, so that a small model can copy them. Raises KeyError for a foreign task.
        """
        entity, relations = _parse_question(task.question)
        actions, found = [], ""
        for relation in relations[: len(relations) - hasty]:
            actions.append(f"<think> {found}seek {relation} </think> <search> {relation} {entity} </search>")
            entity = self.facts[entity, relation]
            found = f"found {entity} "
        return [*actions, f"<think> found {entity} </think> <answer> {entity} </answer>"]

    def vocabulary(self) -> list[str]:
        """Every word of questions, passages and expert actions, without tags; sorted."""
        relations = {relation for _, relation in self.facts}
        return sorted({*_FUNCTION_WORDS, *relations, *chain(*self.entities.values())})


def build_world(seed: int, config: WorldConfig | None = None) -> World:
    """The world of ``seed``: the same seed and config always give the same names, facts and questions."""
    config = config or WorldConfig()
    rng = random.Random(f"world/{seed}")
    relations = {k: dict(list(r.items())[: config.relations_per_kind]) for k, r in RELATIONS.items()}
    reserved = {*_FUNCTION_WORDS, *chain(*RELATIONS.values())}
    sizes = {"person": config.people, "place": config.places, "work": config.works}
    names = make_names(sum(sizes.values()), rng, reserved)
    entities: dict[str, tuple[str, ...]] = {}
    for kind, size in sizes.items():
        entities[kind], names = tuple(names[:size]), names[size:]
    facts = _make_facts(entities, relations, rng)
    passages = [
        Passage(f"fact-{i}", entity, f"{r} {value}") for i, ((entity, r), value) in enumerate(facts.items())
    ]
    rng.shuffle(passages)
    train, test = _make_questions(entities, relations, facts, config, rng)
    return World(config, seed, entities, facts, tuple(passages), train, test)


def _make_facts(
    entities: dict[str, tuple[str, ...]], relations: dict[str, dict[str, str]], rng: random.Random
) -> dict[tuple[str, str], str]:
    facts: dict[tuple[str, str], str] = {}
    for kind, names in entities.items():
        taken = {name: {name} for name in names}
        columns = {r: _assign(names, entities[target], taken, rng) for r, target in relations[kind].items()}
        facts.update(((name, r), columns[r][i]) for i, name in enumerate(names) for r in columns)
    return facts


def _assign(
    sources: tuple[str, ...], targets: tuple[str, ...], taken: dict[str, set[str]], rng: random.Random
) -> list[str]:
    """A value per source, each target equally often, none that the source is or has already.

    Balance keeps every name equally frequent, and makes relations within a kind one-to-one: at most one
    other passage then holds both words of a query, so the right one stays within the top 3.
    """
    full, rest = divmod(len(sources), len(targets))
    values = list(targets) * full + rng.sample(targets, rest)
    rng.shuffle(values)
    clash = [i for i, source in enumerate(sources) if values[i] in taken[source]]
    while clash:
        i, j = clash[-1], rng.randrange(len(sources))
        values[i], values[j] = values[j], values[i]
        clash = [i for i, source in enumerate(sources) if values[i] in taken[source]]
    for source, value in zip(sources, values, strict=True):
        taken[source].add(value)
    return values


def _make_questions(
    entities: dict[str, tuple[str, ...]],
    relations: dict[str, dict[str, str]],
    facts: dict[tuple[str, str], str],
    config: WorldConfig,
    rng: random.Random,
) -> tuple[tuple[Task, ...], tuple[Task, ...]]:
    kind_of = {name: kind for kind, names in entities.items() for name in names}
    numbers = range(config.min_hops, config.max_hops + 1)
    # A path is (entities visited, relations followed); no entity twice, or the answer could be given away.
    paths: list[tuple[tuple[str, ...], tuple[str, ...]]] = [((name,), ()) for name in kind_of]
    train: list[Task] = []
    test: list[Task] = []
    for hops in range(1, config.max_hops + 1):
        paths = [
            ((*visited, facts[visited[-1], relation]), (*followed, relation))
            for visited, followed in paths
            for relation in relations[kind_of[visited[-1]]]
            if facts[visited[-1], relation] not in visited
            and (config.repeat_relations or relation not in followed)
        ]
        if hops not in numbers:
            continue
        totals = (config.train_questions, config.test_questions)
        wanted = [_share(total, hops - config.min_hops, len(numbers)) for total in totals]
        if sum(wanted) > len(paths):
            n_test = len(paths) * wanted[1] // sum(wanted)
            wanted = [len(paths) - n_test, n_test]
        tasks = [_task(visited, followed) for visited, followed in rng.sample(paths, sum(wanted))]
        train += tasks[: wanted[0]]
        test += tasks[wanted[0] :]
    rng.shuffle(train)
    rng.shuffle(test)
    return tuple(train), tuple(test)


def _share(total: int, index: int, parts: int) -> int:
    return total // parts + (index < total % parts)


def _task(visited: tuple[str, ...], followed: tuple[str, ...]) -> Task:
    question = "".join(f"{relation} of " for relation in reversed(followed)) + f"{visited[0]} ?"
    task_id = "-".join((SOURCE, visited[0], *followed))
    return Task(task_id, question, (visited[-1],), SOURCE, titles=visited[:-1])


def _parse_question(question: str) -> tuple[str, list[str]]:
    """(start, relations in the order they are followed)."""
    *relations, start = question.removesuffix(" ?").split(" of ")
    return start, relations[::-1]
