"""Transitions with goals that were achieved later: worked by hand, and against a slow reference."""

import itertools
import pickle

import dm_env
import numpy as np
import pytest
import tree
from adder_steps import FIRST, LAST, MID, make_client, read
from hypothesis import given, settings
from hypothesis import strategies as st

from framework import adders
from framework.adders import block


def reached(achieved, desired):
    """-1 for each step that is not at the goal, where the episode ends."""
    there = (achieved == desired)[..., 0]
    return there - 1.0, there


def distance(achieved, desired):
    return -np.abs(achieved - desired)[..., 0], (achieved == desired)[..., 0]


def step(kinds, places, goals, outcome=reached, discount=None):
    """A time step of envs at `places` with `goals`; its discount is that of `outcome` by default."""
    achieved, desired = (np.array(each, np.float32)[:, None] for each in (places, goals))
    rewards, ends = outcome(achieved, desired)
    observation = {"observation": 10 * achieved, "achieved_goal": achieved, "desired_goal": desired}
    discount = np.where(ends, 0, 1) if discount is None else discount
    return dm_env.TimeStep(np.array(kinds), np.float32(rewards), np.float32(discount), observation)


def play(adder, places, goal, last=LAST):
    """An episode of one env; the action of step t is 100 + t."""
    adder.add_first(step([FIRST], places[:1], [goal]))
    for t, place in enumerate(places[1:]):
        kind = last if t + 2 == len(places) else MID
        adder.add(np.array([100 + t]), step([kind], [place], [goal]))


def make(client, n_step=1, discount=0.5, outcome=reached, **options):
    return adders.HindsightAdder(client, n_step, discount, outcome, max_delay=1e9, **options)


def lines(client):
    """Per item: places and goals of both observations, action, reward and discount."""
    found = []
    for item in read(client):
        before, after = item.observation, item.next_observation
        assert before["observation"] == 10 * before["achieved_goal"], "a goal alone is replaced"
        assert after["observation"] == 10 * after["achieved_goal"]
        pairs = [each[name].item() for each in (before, after) for name in ("achieved_goal", "desired_goal")]
        found.append((*pairs, int(item.action), item.reward.item(), item.discount.item()))
    return found


def test_an_episode_of_four_steps_by_hand():
    client = make_client()
    adder = make(client, strategy="final", num_goals=1)
    play(adder, [0, 1, 2, 3, 4], goal=9)
    adder.flush()
    found = lines(client)
    assert found[:4] == [(t, 9, t + 1, 9, 100 + t, -1, 1) for t in range(4)]
    assert found[4:] == [
        (0, 4, 1, 4, 100, -1, 1),
        (1, 4, 2, 4, 101, -1, 1),
        (2, 4, 3, 4, 102, -1, 1),
        (3, 4, 4, 4, 103, 0, 0),
    ]


def test_windows_of_two_steps_by_hand():
    client = make_client()
    adder = make(client, n_step=2, strategy="final", num_goals=1)
    play(adder, [0, 1, 2, 3, 4], goal=9)
    adder.flush()
    assert lines(client)[5:] == [  # After T + n - 1 of its own goal.
        (0, 4, 2, 4, 100, -1.5, 0.5),
        (1, 4, 3, 4, 101, -1.5, 0.5),
        (2, 4, 4, 4, 102, -1.0, 0.0),
        (3, 4, 4, 4, 103, 0.0, 0.0),
    ]


def test_nothing_is_gained_after_a_goal_inside_a_window():
    client = make_client()
    adder = make(client, n_step=3, strategy="episode", num_goals=30)
    play(adder, [0, 1, 2, 3], goal=9)
    adder.flush()
    found = {line for line in lines(client) if line[0] == 0 and line[1] == 1}
    assert found == {(0, 1, 3, 1, 100, 0, 0)}, "it ends at its first step"


def test_an_episode_that_ended_at_its_goal_goes_on_without_it():
    client = make_client()
    adder = make(client, strategy="episode", num_goals=20)
    play(adder, [0, 1, 2], goal=2)
    adder.flush()
    found = set(lines(client))
    assert (1, 2, 2, 2, 101, 0, 0) in found
    assert (1, 1, 2, 1, 101, -1, 1) in found, "at another goal, the last step is none"
    assert (0, 1, 1, 1, 100, 0, 0) in found and (0, 2, 1, 2, 100, -1, 1) in found


def test_what_ended_for_another_reason_stays_so():
    client = make_client()
    adder = make(client, num_goals=1, strategy="final")
    adder.add_first(step([FIRST], [0], [9]))
    adder.add(np.array([100]), step([MID], [1], [9]))
    adder.add(np.array([101]), step([LAST], [2], [9], discount=[0]))
    adder.flush()
    assert lines(client)[2:] == [(0, 2, 1, 2, 100, -1, 1), (1, 2, 2, 2, 101, 0, 0)]


ENDS = {
    "truncated": lambda adder: None,
    "cut": lambda adder: adder.add(np.array([0]), step([FIRST], [0], [9])),
    "begun again": lambda adder: adder.add_first(step([FIRST], [0], [9])),
    "ended": lambda adder: adder.end_episodes(),
}


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("largest", [1, 3, 256])
def test_the_goals_are_those_of_the_episode_however_it_ends(how, largest, monkeypatch):
    monkeypatch.setattr(block, "_MAX_BLOCK_STEPS", largest)
    client = make_client()
    adder = make(client, num_goals=1, strategy="final")
    play(adder, [0, 1, 2, 3], 9, last=LAST if how == "truncated" else MID)
    ENDS[how](adder)
    if how == "ended":
        adder.add_first(step([FIRST], [0], [9]))
    adder.flush()
    assert sorted(line for line in lines(client) if line[1] != 9) == [
        (0, 3, 1, 3, 100, -1, 1),
        (1, 3, 2, 3, 101, -1, 1),
        (2, 3, 3, 3, 102, 0, 0),
    ]
    adder.reset()
    assert adder.num_dropped_episodes == 0 and adder.close() == 0
    assert all(stream.num_rows == 0 for stream in client.store.streams.values())


def test_open_episodes_have_their_own_goals_only_and_reset_drops_the_rest():
    client = make_client()
    adder = make(client)
    play(adder, [0, 1, 2], 9, last=MID)
    adder.reset()
    assert adder.num_dropped_episodes == 1
    play(adder, [5, 6], 9)
    adder.flush()
    assert {line[1] for line in lines(client) if line[0] < 5} == {9}
    adder.close()
    assert all(stream.num_rows == 0 for stream in client.store.streams.values())


def test_longer_episodes_are_taken_in_parts():
    client = make_client()
    adder = make(client, strategy="final", num_goals=1, max_steps=3)
    for t in range(10):
        kind = FIRST if t == 0 else LAST if t == 9 else MID
        adder.add(0 * np.ones(1, int), step([kind], [t], [90])) if t else adder.add_first(
            step([0], [0], [90])
        )
        adder.flush()
        assert adder._block.history <= 3, "what is kept is bounded"
    goals = {line[0]: line[1] for line in lines(client) if line[1] != 90}
    assert goals == {0: 3, 1: 3, 2: 3, 3: 6, 4: 6, 5: 6, 6: 9, 7: 9, 8: 9}


@st.composite
def scripts(draw):
    """Step types `[time, env]`, and whether the adder writes after each time step."""
    envs = draw(st.integers(1, 3))
    kinds = [[FIRST] * envs]
    for _ in range(draw(st.integers(1, 25))):
        new = st.sampled_from([MID, MID, MID, MID, LAST, FIRST])
        kinds.append([FIRST if kind == LAST else draw(new) for kind in kinds[-1]])
    return kinds, draw(st.lists(st.booleans(), min_size=len(kinds), max_size=len(kinds)))


@settings(max_examples=60, deadline=None)
@given(scripts(), st.integers(1, 4), st.sampled_from(["future", "episode"]), st.booleans(), st.integers(0, 9))
def test_every_item_is_right(script, n, strategy, clips, seed):
    (kinds, flushes), rng, clip = script, np.random.default_rng(seed), 2.5 if clips else None
    client, other = make_client(), make_client()
    adder = make(client, n, 0.5, distance, num_goals=2, strategy=strategy, reward_clip=clip)
    plain = adders.NStepTransitionAdder(other, n, 0.5, reward_clip=clip)
    steps, number = [], itertools.count()
    for types, writes in zip(kinds, flushes, strict=True):
        places, goals = [next(number) / 8 for _ in types], [1000 + next(number) for _ in types]
        discount = rng.choice([0.0, 0.5, 1.0], len(types))
        timestep = step(types, places, goals, distance, discount)
        actions = np.array([int(8 * place) for place in places])
        for each in (adder, plain):
            each.add(actions, timestep) if steps else each.add_first(timestep)
        if any(any(types) for types, *_ in steps) or any(types):
            steps.append((types, places, discount, actions))
        else:  # Until the first action, a FIRST step replaces the one before it.
            steps = [(types, places, discount, actions)]
        if writes:
            adder.flush()
    adder.flush(), plain.flush()
    items, key = read(client), lambda item: [leaf.tolist() for leaf in tree.flatten(item)]
    own = [key(item) for item in items if item.observation["desired_goal"] >= 1000]
    assert own == [key(item) for item in read(other)], "its own goals: those of the other adder, in its order"
    # The steps of each finished episode: places before and after, discount, action.
    episodes, open_steps = [], [[] for _ in kinds[0]]
    for (_, places, _, _), (types, after, discounts, actions) in itertools.pairwise(steps):
        for env, kind in enumerate(types):
            if kind != FIRST:
                open_steps[env].append((places[env], after[env], discounts[env], actions[env]))
            if kind != MID and open_steps[env]:
                episodes.append(open_steps[env])
                open_steps[env] = []
    found = {}
    for item in items:
        if (goal := item.observation["desired_goal"].item()) < 1000:
            found.setdefault(item.observation["achieved_goal"].item(), []).append((goal, item))
    assert {*found} == {place for episode in episodes for place, *_ in episode}
    for episode in episodes:
        for t, (place, *_) in enumerate(episode):
            possible = [after for _, after, *_ in episode[t if strategy == "future" else 0 :]]
            assert len(found[place]) == 2
            for goal, item in found[place]:
                window = episode[t : t + n]
                assert goal in possible and item.next_observation["desired_goal"].item() == goal
                assert item.next_observation["achieved_goal"].item() == window[-1][1]
                assert item.action == window[0][3]
                total, factor, weight = 0.0, 1.0, 1.0
                for _, after, discount, _ in window:
                    reward = max(-abs(after - goal), -np.inf if clip is None else -clip)
                    total += weight * factor * reward
                    factor *= 0.0 if after == goal else discount
                    weight *= 0.5
                np.testing.assert_allclose(item.reward, total, 1e-5)
                np.testing.assert_allclose(item.discount, factor * 0.5 ** (len(window) - 1), 1e-5)


def test_a_step_of_several_envs_has_goals_of_its_own_env():
    client = make_client()
    adder = make(client, num_goals=5)
    for t in range(4):
        timestep = step([FIRST if t == 0 else LAST if t == 3 else MID] * 2, [t, 10 + t], [90, 90])
        adder.add(np.array([0, 1]), timestep) if t else adder.add_first(timestep)
    adder.flush()
    again = [line for line in lines(client) if line[1] != 90]
    assert len(again) == 2 * 3 * 5
    assert all((goal >= 10) == (place >= 10) and goal > place for place, goal, *_ in again)


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="strategy: got 'past'"):
        make(make_client(), strategy="past")
    adder = adders.HindsightAdder(make_client(), 1, 0.9, reached)
    timestep = dm_env.TimeStep(np.array([MID]), np.ones(1), np.ones(1), np.ones((1, 2)))
    adder.add_first(timestep._replace(step_type=np.array([FIRST])))
    with pytest.raises(ValueError, match="expected a dict with achieved_goal and desired_goal"):
        adder.add(np.array([0]), timestep)


WRONG = {
    "other rewards": (lambda a, d: (reached(a, d)[0] - 1, reached(a, d)[1]), "compute_reward returns -2.0"),
    "one reward": (lambda a, d: (np.float32(-1), reached(a, d)[1]), "got rewards of shape .. for 2 goals"),
}


@pytest.mark.parametrize("name", WRONG)
def test_rewards_that_are_no_function_of_the_goals_are_an_error(name):
    outcome, message = WRONG[name]
    adder = make(make_client(), outcome=outcome)
    play(adder, [0, 1, 2], 9)
    with pytest.raises(ValueError, match=message):
        adder.flush()
    with pytest.raises(ValueError, match="no open episode"):
        adder.add(np.array([0]), step([FIRST], [0], [9]))


def test_goals_are_drawn_by_the_seed():
    def drawn(seed):
        client = make_client()
        adder = make(client, seed=seed)
        play(adder, list(range(20)), 90)
        adder.flush()
        return pickle.dumps(lines(client))

    assert drawn(1) == drawn(1) != drawn(2)
