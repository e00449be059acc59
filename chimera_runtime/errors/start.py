"""Messages of the start: stages that the schedule cannot run, and updates of several shapes."""

from collections.abc import Iterable, Sequence

from chimera_runtime.errors import BadModel, Misuse, PeerLost, RanksDiffer, Refused, worded

# Messages of `CompiledSchedule`: stages and calls that do not fit the compiled schedule.

STEP_NEEDS_GRADIENTS = "step() computes gradients, and they are turned off here: call eval() under torch.no_grad()"
NOTHING_HAS_RUN = "there is no pipeline before the first step() or eval(), which gives it the shapes of a micro-batch"
STAGE_HAS_ITS_OWN_BACKWARD = "a PipelineStage with dw_builder runs weight gradients by itself: leave dw_builder out"
CHECK_NEEDS_A_LOSS = "check() compares gradients, which need a loss: give the schedule its loss_fn"
INPUTS_ARE_MISSING = "this rank holds stage 0: give step() and eval() the inputs, or arg_mbs"
TARGETS_ARE_MISSING = "this rank holds the last stage: give step() target=, or target_mbs"
schedule_without_flush = Misuse.worded(
    "{scheme} has no flush, so its stages step inside the schedule, for which torch's interface has no place: use "
    "Pipeline"
)
schedule_has_slices = Misuse.worded(
    "{scheme} has slices, whose stages return a carry next to their output, for which torch's interface has no place: "
    "use Pipeline"
)
stages_are_no_chain = Misuse.worded(
    "the stages of {scheme} are no chain, and in torch's interface each stage feeds the next one: use Pipeline"
)
group_has_another_size = Misuse.worded(
    "workers of {scheme}: {workers}; ranks of the process group: {ranks}. Give group= the pipeline's dimension of a "
    "mesh, as in mesh['pp'].get_group()"
)
stages_are_others = Misuse.worded(
    "the stages that rank {rank} holds in this schedule are {wanted:list}, and those given to it: {stages:list}. "
    "stages_of(directory, rank) says which a rank makes"
)
number_of_stages_differs = Misuse.worded(
    "num_stages of a PipelineStage is {num_stages}, and of {scheme} it is {stages}"
)
batch_cannot_be_cut = Misuse.worded(
    "a batch cannot be cut into its micro-batches, of which there must be {micro_batches}: {reason}"
)


def argument_has_other_rows(name: str, shape: tuple[int, ...], rows: int | None) -> Misuse:
    wanted = "is to be cut into micro-batches" if rows is None else f"the batch is cut by its {rows} rows"
    return Misuse(
        f"{name} is a tensor of shape {shape}, and {wanted}: say how by kwargs_chunk_spec or args_chunk_spec; "
        'or give a keyword argument that goes whole to every micro-batch, by **{whole("name"): ..} with '
        "chimera_runtime.whole"
    )


argument_looks_like_borders = worded(
    "{name} has whole numbers that rise from 0, as borders of documents would, and is cut into micro-batches. If it is "
    'one list for the whole batch, give it by **{{whole("name"): ..}} with chimera_runtime.whole'
)
wrong_number_of_micro_batches = Misuse.worded(
    "the length of {name} is {length}, and must be the number of micro-batches, {micro_batches}"
)
batch_is_given_twice = Misuse.worded("give either {whole}, which is cut into micro-batches, or {listed}")
outputs_are_missing = Misuse.worded(
    "rank {rank} holds the last stage, too, and does not return outputs: give the same return_outputs there"
)

# Messages of `Pipeline`: calls that come too late, or do not fit the schedule.

STEP_TAKES_ONE_OF_TWO = "step takes either a batch or micro_batches"
PIPELINE_IS_CLOSED = "the pipeline is closed: call its methods before close(), or inside the with block"
UPDATE_HAS_FAILED = "an update has failed on this pipeline: make a new one, from the last checkpoint"
torch_is_too_old = Misuse.worded("torch {version} is too old: chimera_runtime needs torch {oldest} or newer")
example_cannot_be_cut = Misuse.worded(
    "{scheme} cuts every micro-batch into {parts}, and dimension 0 of the example is {items}"
)
schedule_has_no_flush = Misuse.worded("{scheme} has no flush: {consequence}")
NO_NORM = (
    "the stages make an update at different times, so there is no norm of all its gradients: clip those of a stage in "
    "before_step, as in clip_grad_norm_([p for _, p in step.named_parameters], 1.0)"
)
NO_SCALER = "stages step without a scaler: train in bfloat16, which needs none"
NO_SHARDS = (
    "its stages step inside the schedule, which leaves no place to gather their weights; its optimizers keep the state "
    "of whole stages"
)
"""Consequences that `schedule_has_no_flush` names: for clip_grad_norm_, unscale_ and sharded_optimizer."""

# Messages about the directory that `chimera compile` writes.

_AGAIN = "compile again, or copy the whole directory again"
script_is_missing = Misuse.worded("{directory} has no {name}: " + _AGAIN)
script_is_of_another_program = Misuse.worded("{path} is of another program than {facts}: " + _AGAIN)
interface_is_another = Misuse.worded(
    "{path} was written for interface {number} of chimera_runtime, and this is interface {interface}: compile again "
    "with the chimera_ir that this chimera_runtime came with"
)
no_output_directory = Misuse.worded(
    "{directory} is no output directory: `chimera compile SCHEME --out {directory}` writes one"
)
facts_cannot_be_read = Misuse.worded("{path}: {why}: " + _AGAIN)
facts_are_damaged = Misuse.worded("{path} is not as it was written: " + _AGAIN)

# Messages about process groups, devices and waits for other ranks.

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
place_text = worded("rank {rank} (worker {worker})")
"""Names a rank at the beginning of a message."""


# Process groups.


def copies_are_not_whole(program: str, workers: int, ranks: int) -> Misuse:
    lower, upper = ranks // workers * workers, (ranks // workers + 1) * workers
    fitting = f"{lower} or {upper}" if lower else f"{upper}"
    return Misuse(
        f"{program} runs on {workers} workers and there {'is' if ranks == 1 else 'are'} {ranks} "
        f"{'rank' if ranks == 1 else 'ranks'}; start a multiple of {workers}: --nproc-per-node={fitting}"
    )


arguments_differ = Misuse.worded(
    "{name} is {first} on rank 0 and {other} on rank {rank}: every rank makes the pipeline with the same arguments"
)
connecting_is_late = PeerLost.worded(
    "rank {rank} (worker {worker}): connecting with the other ranks: not done within {timeout:g} s (timeout); one of "
    "them may be stuck, or ports or the address of a host cannot be reached"
)
communicators_are_unknown = Misuse.worded("communicators {communicators}: it is one of {choices:list}")
gloo_has_no_choice = Misuse.worded(
    "communicators {communicators}: gloo finds messages by their tags, so there is nothing to choose: leave it out"
)
communicators_are_not_proven = Misuse.worded(
    "communicators {communicators}: {program} could wait for ever with one communicator for both directions of a pair "
    "of workers; under communicators, report.json says where: compile it with --communicators pair, or leave it at "
    "directed"
)

# The store.

no_store = Misuse.worded("no store at MASTER_ADDR:MASTER_PORT ({where}): {why}; start with torchrun")


def peer_has_failed(wait: str, rank: int, headline: str) -> PeerLost:
    where = f"{wait}: " if wait else ""
    return PeerLost(f"{where}rank {rank} has failed: {headline}", [rank])


def peer_has_refused(rank: int, words: str) -> Refused:
    return Refused(f"rank {rank}: {words}", [rank])


def key_is_late(wait: str, rank: int, seconds: float) -> PeerLost:
    return PeerLost(f"{wait}: no answer from rank {rank} within {seconds:g} s (timeout)", [rank])


objects_are_late = PeerLost.worded("rank {rank}: wait for what other ranks say of {what}: {why}")

# Waits.

NO_ANSWER = "no answer within"
"""The beginning of the cause of a wait that took longer than the time-out."""

torchrun_has_died = PeerLost.worded("rank {rank} (worker {worker}): torchrun has died, and its ranks end")
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
    return PeerLost(f"{place_text(rank=rank, worker=worker)}: wait {operation}: {peer}: {cause}", peers)


# Devices.


device_is_not_of_the_backend = Misuse.worded(
    "--device {device}: --backend {backend} is for {kinds:list}; leave --device out"
)
device_is_unknown = Misuse.worded("device={device!r}: torch knows no such device; it is cpu, cuda or as in cuda:1")
device_needs_a_gpu = Misuse.worded("device={device!r} needs a GPU, and {why}: use device='cpu' and a group of gloo")
device_number_is_too_high = Misuse.worded("device={device!r}: this machine has {count}, and they count from cuda:0")
gpu_is_shared = Misuse.worded(
    "ranks {first} and {rank} are on one GPU, {device} of rank {rank}, which NCCL does not allow: before the pipeline "
    'is made call torch.cuda.set_device(int(os.environ["LOCAL_RANK"])), or use a group of gloo, with which ranks share '
    "a GPU"
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


# Facts that must be equal, and calls that all ranks make.

error_of_a_rank = worded("rank {rank}: {error.__class__.__name__}: {error}")


def facts_differ(where: str, complaints: Iterable[str], advice: Iterable[str]) -> RanksDiffer:
    return RanksDiffer(f"{where}: {'; '.join(complaints)}: {'; '.join(advice)}")


SAMPLER_AND_SHUFFLE = "a sampler decides the order: leave shuffle=True out"
check_has_no_program = Misuse.worded(
    "a check compares one program, and there is none for {copies:and} micro-batches of the copies: give each as "
    "many as one of {numbers:list}"
)
TWO_SAMPLERS = "a batch sampler decides the order and the mini-batches: leave sampler= out"
SAMPLER_OF_ONE_RANK = "the sampler gives every rank other items, and so does the loader: use shuffle=True instead"
stages_are_refused = Misuse.worded("{complaint}")
"""An error of `inventory`, with one of the complaints below or of ``errors.model``."""

initial_weights_differ = worded(
    "stage {stage} starts with other weights on rank {ranks[1]} than on rank {ranks[0]}, first in {parameter}: a stage "
    "or a layer may draw random numbers from torch alone, which is seeded alike on all ranks"
)
initial_loss_differs = worded(
    "the loss starts with other weights on rank {ranks[1]} than on rank {ranks[0]}, first in {parameter}: seed torch "
    "alike on all ranks before the loss is made (torch.manual_seed), or give it fixed values"
)
parameters_differ = worded(
    "stage {stage} has {here} on rank {ranks[0]} and {there} on rank {ranks[1]}: let build_stage make the same module "
    "on every rank"
)
no_stage_takes_keyword = Misuse.worded(
    "no stage takes the keyword argument {name}: its forward has no parameter of that name"
)
recomputed_stage_changes_input = Misuse.worded(
    "stage {stage} changes {what} in place, but is to run on it again; let it work on a copy"
)


def leaf_is_unknown(stage: int | None, words: str) -> Misuse:
    """``words`` name a leaf that the forward of a stage trains, or the loss if ``stage`` is None."""
    cause = "requires a gradient, and is no parameter that the pipeline would sum over ranks, step, save and check"
    if stage is None:
        return Misuse(
            f"the gradient of the loss reaches {words}, which {cause}: give an nn.Module that has it as a parameter as "
            "the loss, or detach it"
        )
    return Misuse(
        f"the gradient of stage {stage} reaches {words}, which {cause}: let the module of the stage have it as a "
        "parameter (nn.Parameter, register_parameter), or detach it; what stages share is declared in tied(num_stages)"
    )


loss_writes_what_is_unknown = Misuse.worded(
    "the loss writes the buffer {words}, which the pipeline does not know, and so cannot restore after the start and "
    "evaluations, save or check: give the module itself as the loss, or one that has it in it"
)
backward_is_bent = worded(
    "the backward of stage {stage} is not linear in the gradients with which it begins, as one with a hook that clips "
    "or rounds them, and loss returns (sum, count): backwards begin before the total of the counts is known, on "
    "gradients divided by an estimate, a power of 2, and these are corrected afterwards. So what such a hook sees is "
    "too large or too small, by a factor of up to about 1.5: let loss return a mean, or clip with clip_grad_norm_"
)
losses_are_of_others = Misuse.worded(
    "loss has functions for {losses:list}, and the stages of {scheme} that feed no other are {names:list}: give one "
    "function for each, or a single function for all"
)
loss_of_another_has_state = Misuse.worded(
    "the loss of {name} is a module with parameters or buffers: where several stages compute a loss, only that of the "
    "last one, {last}, may have any. Put those of the others into their stages"
)
count_is_known_too_late = Misuse.worded(
    "the loss of {name} returns a sum and a count, and other stages compute a loss as well: a stage before both gets "
    "the sum of their gradients, which is not right for a count that is known afterwards. Let the loss of {name} be a "
    "CountedLoss, whose count is a function of the target, or the mean over its micro-batch"
)
several_means_of_unequal_slices = Misuse.worded(
    "the loss of {name} returns a mean, and slices have unequal lengths: let it be a CountedLoss, a sum over the slice "
    "and the count of the target"
)
frozen_stage_is_trained = Misuse.worded(
    "stage {stage} is frozen in {scheme}, and its module has parameters with requires_grad: {names:first 3}. Call "
    "requires_grad_(False) where the stage is made, or take the stage out of the scheme's line `frozen`"
)
trained_stage_is_frozen = Misuse.worded(
    "no parameter of stage {stage} has requires_grad, and {scheme} trains it: its line `frozen` has {frozen:stage} "
    "alone. Add the stage to that line, or train a parameter"
)
_IN_A_BUFFER = "keep in a buffer (register_buffer) what a forward changes"
forward_replaces_parameter = Misuse.worded(
    "the forward of stage {stage} registers, replaces or deletes the parameter {name}, which no optimizer and no "
    "checkpoint would notice: register parameters where the module is made, and " + _IN_A_BUFFER
)
forward_writes_large_parameter = Misuse.worded(
    "the forward of stage {stage} writes its frozen parameter {name}, which is too large for a copy at start, so that "
    "its value is lost: " + _IN_A_BUFFER
)
forward_writes_parameter = worded(
    "the forward of stage {stage} writes its {names:parameter}, in the order in which the schedule runs micro-batches. "
    "Ranks that hold the same stage each write for their own micro-batches, and replicas that drift apart by that are "
    "an error later: " + _IN_A_BUFFER + ", which may differ. Write under torch.no_grad(), not through .data, so that "
    "torch notices if a backward needs the former values"
)


def stages_are_in_evaluation_mode(stages: Sequence[int]) -> str:
    several, numbers = len(stages) > 1, ", ".join(map(str, stages))
    return (
        f"stage{'s' if several else ''} {numbers} {'are' if several else 'is'} in evaluation mode, as from_pretrained "
        "returns a model, and will train without dropout, with normalizations by their running statistics: call "
        "model.train() where the stages are made, unless this is meant, as for a frozen encoder"
    )


output_without_dimensions = Misuse.worded(
    "stage {stage} returns a tensor without dimensions, but handles several micro-batches in one operation; return "
    "tensors with the micro-batch in dimension 0"
)
carry_is_opaque = Misuse.worded(
    "the carry of stage {stage} holds a {kind}, in which gradients would not be found: return tensors in tuples, lists "
    "or dicts, or in a class that torch.utils._pytree knows"
)
slices_differ = Misuse.worded(
    "stage {stage} hands on tensors of shapes {shapes} for slice {number}, and {first} for slice 0: let it return the "
    "same structure and shapes for every slice"
)
slices_differ_in_form = Misuse.worded(
    "stage {stage} hands on tensors that differ between slices in more than their lengths: let it return the same "
    "structure, dtypes and dimensions for every slice"
)
MEAN_OF_UNEQUAL_SLICES = (
    "the slices of this program have unequal lengths, and loss returns a mean, which does not say how much each slice "
    "counts: return a pair of the sum and the number of items, or compile the scheme without --slice-lengths"
)
VARYING_IN_UNEQUAL_SLICES = (
    "the slices of this program have unequal lengths, which varying= does not know for other shapes: leave it out, or "
    "compile the scheme without --slice-lengths"
)
shapes_vary_without_flush = Misuse.worded(
    "{scheme} has no flush: messages of several updates are under way together, so all have the example's shapes; "
    "leave out varying="
)
number_of_tensors_differs = Misuse.worded("{name} has other tensors than the example: {here} and not {in_example}")
tensor_is_larger_than_example = Misuse.worded(
    "a tensor of {name} is {here}, and the example's is {in_example}: make the pipeline with an example of the "
    "largest shapes that are to come"
)
as_in_others = worded("others of its tensors have {items:item}")
micro_batch_is_empty = Misuse.worded("{name} has no items: give fewer micro-batches")
is_not_in_one_piece = Misuse.worded(
    "the mini-batch lacks {what}: with varying= every rank gives inputs and keyword arguments of a mini-batch in one "
    "piece, or all ranks give a function, a list or the mini-batch of a loader"
)
ranks_differ_in_shapes = RanksDiffer.worded(
    "ranks of copy {copy} have other tensors of micro-batch {micro}: {what} is {sizes[0]} on one and {sizes[1]} on "
    "another; give all ranks of a copy the same mini-batch"
)
block_differs_in_shape = Misuse.worded(
    "{scheme} has micro-batches {micros:and} in one operation, and they differ in shape or number of items: pad them, "
    "or use a program with an operation for each micro-batch"
)
output_is_larger_than_for_example = BadModel.worded(
    "stage {stage} returned for shapes that are no larger than the example's: {excess}"
)
loader_numbers_are_too_small = Misuse.worded(
    "num_workers={num_workers}, prefetch_factor={prefetch_factor}: no such numbers of either"
)
