"""What cannot be placed on a cluster is an error that names the group, its needs and the hosts."""

import pytest

import launch
from launch.engines.options import Resources
from launch.engines.ray import placement

HOSTS = {"one": {"CPU": 4}, "two": {"CPU": 4, "GPU": 2, "big_memory": 1}}


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"learner": (Resources(num_gpus=4), 1)}, "'learner': got GPU 4 .*1 nodes.* one has CPU 4; two has"),
        ({"learner": (Resources(num_gpus=1), 4)}, "room for 4 nodes; there is room for 2"),
        ({"learner": (Resources(num_gpus=1, num_cpus=5), 1)}, "got CPU 5, GPU 1"),
        ({"replay": (Resources(custom={"tape": 1}), 1)}, "got tape 1"),
        (
            {"learner": (Resources(num_cpus=2, strategy="STRICT_PACK"), 3)},
            "one host that has this 3 times, for STRICT_PACK",
        ),
        ({"learner": (Resources(num_gpus=1, strategy="STRICT_SPREAD"), 2)}, "2 hosts that have this"),
        (
            {"learner": (Resources(num_gpus=1), 1), "inference": (Resources(num_gpus=1), 2)},
            r"GPU 3 for all nodes together \(learner 1, inference 2\), expected at most 2",
        ),
    ],
)
def test_what_cannot_be_placed_is_an_error(groups, message):
    with pytest.raises(launch.LaunchError, match=message):
        placement.check(groups, HOSTS)


@pytest.mark.parametrize(
    ("resources", "count"),
    [
        (Resources(), 1000),  # reserves nothing
        (Resources(strategy="STRICT_PACK"), 900),
        (Resources(num_cpus=0.1), 80),
        (Resources(num_cpus=0, num_gpus=0.5), 4),
        (Resources(num_cpus=2, strategy="PACK"), 4),
        (Resources(num_cpus=2, strategy="STRICT_SPREAD"), 2),
    ],
)
def test_what_fits_an_idle_cluster_is_none(resources, count):
    placement.check({"group": (resources, count)}, HOSTS)


def test_a_host_without_cores_runs_what_asks_for_none():
    placement.check({"learner": (Resources(num_gpus=1, num_cpus=0), 1)}, {"one": {"GPU": 1}})
    with pytest.raises(launch.LaunchError, match="got CPU 1 for each of 1 nodes"):
        placement.check({"actor": (Resources(), 1)}, {"one": {"GPU": 1}})


def test_a_strategy_of_the_program_holds_unless_its_resources_have_another():
    program = launch.Program("test")
    program.add_node(launch.PyNode(launch.stop, 1), label="main")
    program.strategies = {"main": "SPREAD"}
    for given, expected in (({}, "SPREAD"), ({"threads": 2}, "SPREAD"), ({"strategy": "PACK"}, "PACK")):
        with launch.start(program, "threads", resources={"main": given}) as job:
            assert job._options.resources["main"].strategy == expected
            job.wait()
    with launch.start(program, "threads") as job:
        assert job._options.resources["main"].strategy == "SPREAD"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"strategy": "PACKED"}, "strategy: got 'PACKED', expected one of"),
        ({"num_gpus": -1}, "num_gpus: got -1, expected a number of at least 0"),
        ({"num_cpus": "two"}, "num_cpus: got 'two'"),
        ({"custom": {"tape": "x"}}, "tape: got 'x'"),
        ({"threads": 0}, "threads: got 0"),
    ],
)
def test_resources_of_no_sense_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Resources(**fields)


def test_machines_can_be_named():
    """By the resources that Ray makes itself, which no message lists."""
    hosts = {"one": {"CPU": 4, "node:10.0.0.1": 1.0}, "two": {"CPU": 4, "accelerator_type:H100": 1.0}}
    for name in ("node:10.0.0.1", "accelerator_type:H100"):
        placement.check({"actor": (Resources(custom={name: 0.01}), 2)}, hosts)
    with pytest.raises(launch.LaunchError, match="one has CPU 4; two has CPU 4"):
        placement.check({"actor": (Resources(custom={"node:10.0.0.9": 0.01}), 1)}, hosts)
