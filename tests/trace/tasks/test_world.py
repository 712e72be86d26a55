from __future__ import annotations

import random
from collections import Counter

import pytest

from trace_rl.tasks.names import make_names
from trace_rl.tasks.world import RELATIONS, WorldConfig, build_world

SMALL = WorldConfig(people=6, places=7, works=9, train_questions=60, test_questions=30)


@pytest.fixture(scope="module", params=[0, 1, 2])
def world(request):
    return build_world(request.param)


def brute_force(world, question):
    """All answers, from the passages' words alone: every passage that fits is followed."""
    *relations, start = question.removesuffix(" ?").split(" of ")
    reached = {start}
    for relation in reversed(relations):
        reached = {
            p.text.split()[1] for p in world.passages if p.title in reached and p.text.split()[0] == relation
        }
    return reached


def test_answers_are_unique(world):
    for task in world.train[:150] + world.test:
        assert brute_force(world, task.question) == set(task.answers)


def test_facts_are_well_typed_and_informative(world):
    kind_of = {name: kind for kind, names in world.entities.items() for name in names}
    assert len(kind_of) == 120
    for (entity, relation), value in world.facts.items():
        assert kind_of[value] == RELATIONS[kind_of[entity]][relation]
        assert value != entity
    for entity in kind_of:
        values = [v for (e, _), v in world.facts.items() if e == entity]
        assert len(values) == len(set(values)) == 4


def test_splits_are_disjoint_and_even(world):
    assert len({t.id for t in world.train} | {t.id for t in world.test}) == 1800
    assert len({t.question for t in world.train} | {t.question for t in world.test}) == 1800
    assert Counter(map(world.hops, world.train)) == {2: 500, 3: 500, 4: 500}
    assert Counter(map(world.hops, world.test)) == {2: 100, 3: 100, 4: 100}


def test_questions_do_not_give_the_answer_away(world):
    for task in world.train + world.test:
        assert task.answers[0] not in task.question.split()
        assert task.answers[0] not in task.titles
        assert len(set(task.titles)) == len(task.titles) == world.hops(task)


def test_same_seed_same_world():
    assert build_world(3, SMALL) == build_world(3, SMALL)
    assert build_world(3, SMALL).facts != build_world(4, SMALL).facts


def test_expert_actions_name_what_was_found_and_is_sought():
    world = build_world(0)
    task = next(t for t in world.train if world.hops(t) == 2)
    outer, inner, start = task.question.removesuffix(" ?").split(" of ")
    middle = world.facts[start, inner]
    assert world.expert_actions(task) == [
        f"<think> seek {inner} </think> <search> {inner} {start} </search>",
        f"<think> found {middle} seek {outer} </think> <search> {outer} {middle} </search>",
        f"<think> found {task.answers[0]} </think> <answer> {task.answers[0]} </answer>",
    ]


def test_vocabulary_covers_all_text(world):
    words = set(world.vocabulary())
    assert 100 < len(words) < 200
    for task in world.train + world.test:
        assert set(task.question.split()) <= words
        spoken = {w for action in world.expert_actions(task) for w in action.split()}
        assert all(w in words or w[0] == "<" for w in spoken)
    for p in world.passages:
        assert {p.title, *p.text.split()} <= words


@pytest.mark.parametrize(
    "config",
    [
        WorldConfig(5, 5, 5),
        WorldConfig(5, 9, 23, relations_per_kind=2, min_hops=1, max_hops=3),
        WorldConfig(8, 5, 6, relations_per_kind=3, repeat_relations=True),
    ],
)
def test_small_worlds(config):
    for seed in range(10):
        world = build_world(seed, config)
        assert world.train
        assert world.test
        assert not {t.id for t in world.train} & {t.id for t in world.test}
        assert {world.hops(t) for t in world.train} <= set(range(config.min_hops, config.max_hops + 1))
        for task in world.test:
            assert brute_force(world, task.question) == set(task.answers)


def test_no_repeated_relations_unless_asked():
    def repeats(world):
        return [t for t in world.train if len(set(t.id.split("-")[2:])) < world.hops(t)]

    assert not repeats(build_world(0))
    assert repeats(build_world(0, WorldConfig(repeat_relations=True)))


@pytest.mark.parametrize(
    "wrong",
    [
        {"people": 4},
        {"relations_per_kind": 1},
        {"relations_per_kind": 5},
        {"min_hops": 0},
        {"max_hops": 1},
        {"train_questions": -1},
    ],
)
def test_impossible_configs(wrong):
    with pytest.raises(ValueError, match=r"world|relations|hops|questions"):
        WorldConfig(**wrong)


def test_names():
    names = make_names(500, random.Random(0), {"Dovik"})
    assert len({n.lower() for n in names}) == 500
    assert all(n.isalpha() and n[0].isupper() and n[1:].islower() for n in names)
    with pytest.raises(ValueError, match="at most"):
        make_names(10**6, random.Random(0))
