"""Which GPUs a process may ask for, and giving each worker one: on a made-up file system and environment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from swa_decode_meta.fuzz.devices import pin, visible_gpus

VARIABLES = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")

Machine = Callable[[Path, int], Path]

each_variable = pytest.mark.parametrize("variable", VARIABLES)


def rocm(root: Path, gpus: int, cpus: int = 2) -> Path:
    """A machine with ROCm's driver: its CPUs are nodes too, with a gpu_id of 0."""
    for node in range(cpus + gpus):
        folder = root / f"sys/class/kfd/kfd/topology/nodes/{node}"
        folder.mkdir(parents=True)
        (folder / "gpu_id").write_text(f"{0 if node < cpus else 40000 + node}\n")
    return root


def nvidia(root: Path, gpus: int) -> Path:
    """A machine with NVIDIA's driver, with the other device files that it has."""
    (root / "dev").mkdir()
    for name in (*(f"nvidia{i}" for i in range(gpus)), "nvidiactl", "nvidia-uvm", "nvidia-caps", "null"):
        (root / "dev" / name).touch()
    return root


@pytest.mark.parametrize("machine", [rocm, nvidia])
@pytest.mark.parametrize("gpus", [0, 1, 2, 8, 11])
def test_the_gpus_of_a_machine_are_counted_and_nothing_else(tmp_path: Path, machine: Machine, gpus: int) -> None:
    assert visible_gpus({}, machine(tmp_path, gpus)) == [str(i) for i in range(gpus)]


def test_a_machine_without_a_driver_has_no_gpu(tmp_path: Path) -> None:
    assert visible_gpus({}, tmp_path) == []


@each_variable
def test_the_environment_says_which_gpus_there_are(tmp_path: Path, variable: str) -> None:
    machine = rocm(tmp_path, 8)
    assert visible_gpus({variable: "2, 3,GPU-5f2e"}, machine) == ["2", "3", "GPU-5f2e"]
    assert visible_gpus({variable: ""}, machine) == []


def test_of_several_variables_the_one_nearest_to_torch_counts(tmp_path: Path) -> None:
    # ROCR_VISIBLE_DEVICES filters first: HIP's and CUDA's numbers count within what it leaves.
    environ = {"ROCR_VISIBLE_DEVICES": "4,5,6", "HIP_VISIBLE_DEVICES": "0,2"}
    assert pin("gw1", environ, rocm(tmp_path, 8)) == "2"
    assert environ == {"ROCR_VISIBLE_DEVICES": "4,5,6", "HIP_VISIBLE_DEVICES": "2"}


@pytest.mark.parametrize(
    ("machine", "variable"), [(rocm, "HIP_VISIBLE_DEVICES"), (nvidia, "CUDA_VISIBLE_DEVICES")], ids=["rocm", "nvidia"]
)
def test_workers_take_the_gpus_in_turn_and_share_them_when_they_are_more(
    tmp_path: Path, machine: Machine, variable: str
) -> None:
    root = machine(tmp_path, 3)
    for worker in range(8):
        environ = {"PATH": "/bin"}
        assert pin(f"gw{worker}", environ, root) == str(worker % 3)
        assert environ == {"PATH": "/bin", variable: str(worker % 3)}


@each_variable
def test_a_worker_takes_its_gpu_of_those_that_the_environment_allows(tmp_path: Path, variable: str) -> None:
    root = rocm(tmp_path, 8)
    for worker in range(5):
        environ = {variable: "5,GPU-5f2e"}
        assert pin(f"gw{worker}", environ, root) == ("5", "GPU-5f2e")[worker % 2]
        assert environ == {variable: ("5", "GPU-5f2e")[worker % 2]}


def test_a_worker_may_be_named_by_its_number_alone(tmp_path: Path) -> None:
    assert pin("12", {}, nvidia(tmp_path, 8)) == "4"


@pytest.mark.parametrize("machine", [rocm, nvidia])
@pytest.mark.parametrize("gpus", [0, 1])
def test_with_one_gpu_or_none_nothing_changes(tmp_path: Path, machine: Machine, gpus: int) -> None:
    environ: dict[str, str] = {}
    assert pin("gw1", environ, machine(tmp_path, gpus)) is None
    assert environ == {}


@each_variable
@pytest.mark.parametrize("allowed", ["", "3"])
def test_with_one_gpu_allowed_or_none_nothing_changes(tmp_path: Path, variable: str, allowed: str) -> None:
    environ = {variable: allowed}
    assert pin("gw1", environ, rocm(tmp_path, 8)) is None
    assert environ == {variable: allowed}


@pytest.mark.parametrize("worker", ["", "master", "gw", "gw-1", "gw1x", "worker1"])
def test_a_process_that_is_no_worker_keeps_all_gpus(tmp_path: Path, worker: str) -> None:
    environ: dict[str, str] = {}
    assert pin(worker, environ, rocm(tmp_path, 8)) is None
    assert environ == {}


def test_pinning_again_changes_nothing(tmp_path: Path) -> None:
    root, environ = nvidia(tmp_path, 4), {}
    assert pin("gw3", environ, root) == "3"
    assert pin("gw2", environ, root) is None
    assert environ == {"CUDA_VISIBLE_DEVICES": "3"}
