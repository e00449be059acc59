"""Settings of CUDA with which programs may hang are warned of, where something on the device waits for other ranks."""

import pytest

from chimera_runtime.ranks.devices import cuda_warnings


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Settings that nothing is said about."""
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    monkeypatch.setenv("CUDA_MODULE_LOADING", "EAGER")
    return monkeypatch


def test_the_settings_of_train_py_are_not_warned_of() -> None:
    assert cuda_warnings("nccl", "cuda") == []


@pytest.mark.parametrize("count", ["1", "7"])
def test_few_queues_are_warned_of_with_what_may_happen_and_what_to_do(settings: pytest.MonkeyPatch, count: str) -> None:
    settings.setenv("CUDA_DEVICE_MAX_CONNECTIONS", count)
    (warning,) = cuda_warnings("nccl", "cuda")
    assert warning.startswith(f"CUDA_DEVICE_MAX_CONNECTIONS is {count}: ")
    assert "may hang until the timeout; unset CUDA_DEVICE_MAX_CONNECTIONS, or set it to 8 or more" in warning


@pytest.mark.parametrize("count", ["8", "32", "", "no number"])
def test_enough_are_not_nor_what_cuda_does_not_know(settings: pytest.MonkeyPatch, count: str) -> None:
    settings.setenv("CUDA_DEVICE_MAX_CONNECTIONS", count)
    assert cuda_warnings("nccl", "cuda") == []


@pytest.mark.parametrize("loading", ["LAZY", None])
def test_kernels_that_are_loaded_when_they_are_first_launched_are_warned_of(
    settings: pytest.MonkeyPatch, loading: str | None
) -> None:
    """As CUDA does where nothing is set."""
    if loading is None:
        settings.delenv("CUDA_MODULE_LOADING")
    else:
        settings.setenv("CUDA_MODULE_LOADING", loading)
    (warning,) = cuda_warnings("nccl", "cuda")
    assert warning.startswith("CUDA_MODULE_LOADING is LAZY: ")
    assert warning.endswith("set CUDA_MODULE_LOADING=EAGER before Python starts")


@pytest.mark.parametrize("place", [("gloo", "cuda"), ("gloo", "cpu"), ("strict", "cpu")])
def test_nothing_matters_where_the_device_waits_for_nobody(
    settings: pytest.MonkeyPatch, place: tuple[str, str]
) -> None:
    settings.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    settings.setenv("CUDA_MODULE_LOADING", "LAZY")
    assert cuda_warnings(*place) == []
