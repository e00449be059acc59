"""Messages about process groups, devices and waits for other ranks."""

from collections.abc import Iterable, Sequence

from chimera_runtime.errors import BadCheckpoint, Misuse, PeerLost, RanksDiffer, Refused

NO_PROCESS_GROUP = "there is no process group: call torch.distributed.init_process_group() before"
NOT_IN_THE_GROUP = "this rank is not in the group that it gave: every rank gives one that it is a part of"
PROGRAMS_DIFFER = (
    "the ranks run different programs: compile again before they start, or copy the whole directory to every "
    "machine again"
)
NOT_STARTED_BY_TORCHRUN = (
    "start the program with torchrun, as in: torchrun --nproc-per-node=WORKERS train.py --model MODEL.py"
)
STORE_OF_RANKS_BEFORE = (
    "ranks that torchrun starts again (--max-restarts) would look for each other where the ranks before were, "
    "and fail: make the process group by init_process_group(BACKEND, **chimera_runtime.fresh_store())"
)


def place_text(rank: int, worker: int) -> str:
    """Names a rank at the beginning of a message."""
    return f"rank {rank} (worker {worker})"


# Process groups.


def copies_are_not_whole(program: str, workers: int, ranks: int) -> Misuse:
    lower, upper = ranks // workers * workers, (ranks // workers + 1) * workers
    fitting = f"{lower} or {upper}" if lower else f"{upper}"
    return Misuse(
        f"{program} runs on {workers} workers and there {'is' if ranks == 1 else 'are'} {ranks} "
        f"{'rank' if ranks == 1 else 'ranks'}; start a multiple of {workers}: --nproc-per-node={fitting}"
    )


def arguments_differ(name: str, first: str, other: str, rank: int) -> Misuse:
    return Misuse(
        f"{name} is {first} on rank 0 and {other} on rank {rank}: every rank makes the pipeline with the same arguments"
    )


def connecting_is_late(rank: int, worker: int, timeout: float) -> PeerLost:
    return PeerLost(
        f"{place_text(rank, worker)}: connecting with the other ranks: not done within {timeout:g} s "
        "(timeout); one of them may be stuck, or ports or the address of a host cannot be reached"
    )


def communicators_are_unknown(communicators: str, choices: Iterable[str]) -> Misuse:
    return Misuse(f"communicators {communicators}: it is one of {', '.join(choices)}")


def gloo_has_no_choice(communicators: str) -> Misuse:
    return Misuse(
        f"communicators {communicators}: gloo finds messages by their tags, so there is nothing to choose: leave it out"
    )


def communicators_are_not_proven(communicators: str, program: str) -> Misuse:
    return Misuse(
        f"communicators {communicators}: {program} could wait for ever with one communicator for both directions "
        "of a pair of workers; under communicators, report.json says where: compile it with "
        "--communicators pair, or leave it at directed"
    )


# The store.


def no_store(where: str, why: str) -> Misuse:
    return Misuse(f"no store at MASTER_ADDR:MASTER_PORT ({where}): {why}; start with torchrun")


def peer_has_failed(wait: str, rank: int, headline: str) -> PeerLost:
    where = f"{wait}: " if wait else ""
    return PeerLost(f"{where}rank {rank} has failed: {headline}", [rank])


def peer_has_refused(rank: int, words: str) -> Refused:
    return Refused(f"rank {rank}: {words}", [rank])


def key_is_late(wait: str, rank: int, seconds: float) -> PeerLost:
    return PeerLost(f"{wait}: no answer from rank {rank} within {seconds:g} s (timeout)", [rank])


def objects_are_late(rank: int, what: str, why: str) -> PeerLost:
    return PeerLost(f"rank {rank}: wait for what other ranks say of {what}: {why}")


# Waits.

NO_ANSWER = "no answer within"
"""The beginning of the cause of a wait that took longer than the time-out."""


def torchrun_has_died(rank: int, worker: int) -> PeerLost:
    return PeerLost(f"{place_text(rank, worker)}: torchrun has died, and its ranks end")


_WORDS_OF_AN_END = ("onnection", "reset", "roken pipe", "EOF", "remote process exited", "communicator was aborted")
"""Words of gloo and NCCL for a rank that has ended; NCCL aborts its communicator then."""


def wait_has_failed(
    rank: int, worker: int, operation: str, peers: Sequence[int], *, why: str, timeout: float
) -> PeerLost:
    peer = f"rank{'s' if len(peers) > 1 else ''} {', '.join(map(str, peers))}" if peers else "the other ranks"
    if "imed out" in why:
        cause = f"{NO_ANSWER} {timeout:g} s (timeout); it may be stuck, or slower than that"
    elif any(word in why for word in _WORDS_OF_AN_END):
        cause = "the connection was closed; it has died or ended"
    else:
        cause = why.split("\n", 1)[0]
    return PeerLost(f"{place_text(rank, worker)}: wait {operation}: {peer}: {cause}", peers)


# Devices.


def device_is_not_of_the_backend(device: str, backend: str, kinds: Iterable[str]) -> Misuse:
    return Misuse(f"--device {device}: --backend {backend} is for {', '.join(kinds)}; leave --device out")


def device_is_unknown(device: str) -> Misuse:
    return Misuse(f"device={device!r}: torch knows no such device; it is cpu, cuda or as in cuda:1")


def device_needs_a_gpu(device: str, why: str) -> Misuse:
    return Misuse(f"device={device!r} needs a GPU, and {why}: use device='cpu' and a group of gloo")


def device_number_is_too_high(device: str, count: int) -> Misuse:
    return Misuse(f"device={device!r}: this machine has {count}, and they count from cuda:0")


def gpu_is_shared(first: str, rank: int, device: str) -> Misuse:
    return Misuse(
        f"ranks {first} and {rank} are on one GPU, {device} of rank {rank}, which NCCL does not allow: before the "
        'pipeline is made call torch.cuda.set_device(int(os.environ["LOCAL_RANK"])), or use a group of gloo, with '
        "which ranks share a GPU"
    )


def _option_for_a_gpu(backend: str) -> str:
    return "--device cuda needs a GPU" if backend == "gloo" else f"--backend {backend} needs one GPU per rank"


def no_gpu(backend: str, why: str) -> Misuse:
    return Misuse(f"{_option_for_a_gpu(backend)}, and {why}: use --device cpu --backend gloo")


def too_few_gpus(backend: str, count: int, ranks: int) -> Misuse:
    return Misuse(
        f"{_option_for_a_gpu(backend)}; this machine has {count}, and torchrun starts {ranks} here: choose "
        f"--nproc-per-node={count}, or use --device cuda --backend gloo, with which ranks share a GPU"
    )


def store_has_failed(words: str) -> PeerLost:
    return PeerLost(words)


# Facts that must be equal, and calls that all ranks make.


def error_of_a_rank(rank: int, error: Exception) -> str:
    return f"rank {rank}: {type(error).__name__}: {error}"


def call_is_refused(words: str) -> BadCheckpoint:
    return BadCheckpoint(words)


def facts_differ(where: str, complaints: Iterable[str], advice: Iterable[str]) -> RanksDiffer:
    return RanksDiffer(f"{where}: {'; '.join(complaints)}: {'; '.join(advice)}")
