"""Messages about what a stage, a loss or a step does while a model trains."""

from collections.abc import Sequence

from chimera_runtime.errors import BadCheckpoint, BadModel, Misuse, RanksDiffer, worded

# Messages of evaluation and inference.

NOTHING_TO_EVALUATE = "there is nothing to evaluate: no batch was given"
PREDICTIONS_HAVE_NO_ITEMS = "the last stage returns something else than tensors with the items in dimension 0"
PREDICTIONS_HAVE_NO_SEQUENCE = (
    "micro-batches are cut into slices, and the last stage returns something else than tensors with the positions of "
    "the slice in dimension 1: return such tensors, or predict with a scheme without slices"
)
evaluation_output_differs = BadModel.worded(
    "stage {stage} returned for micro-batch {micro} of an evaluation: {difference}; return the same in evaluation mode"
)
rows_are_not_items = Misuse.worded(
    "the last micro-batch of an evaluation is smaller, {items} in place of {whole}, and what stage {stage} hands on "
    "has no rows of single items in dimension 0: leave the last items out (drop_last=True)"
)
evaluation_lacks_keyword = Misuse.worded("a batch of an evaluation has no keyword argument {name}, and the example had")

# Messages about optimizers and schedulers.

PARAMETER_IS_NOT_OF_THE_PIPELINE = (
    "an optimizer steps a parameter that the pipeline does not have: make it of pipe.named_parameters()"
)
SHARDED_TAKES_NO_FURTHER_PARAMETERS = (
    "a sharded optimizer takes no further parameters: make one of all that are to be stepped"
)
two_optimizers_step = Misuse.worded("two optimizers step {parameter}: a checkpoint keeps the state of one by its name")
state_dict_has_another_form = Misuse.worded(
    "state_dict() of the optimizer {optimizer} has no state and param_groups of its parameters, as those of "
    "torch.optim have: it cannot be saved by their names; of_rank= keeps any object with a state_dict"
)
sharded_is_no_optimizer = Misuse.worded("a {name} cannot be sharded: that takes a torch.optim.Optimizer")
sharded_may_not_be_elementwise = Misuse.worded(
    "a {name} may look at a parameter as a whole, and a shard is a part of one: sharded can be, of torch's own, "
    "{elementwise:list}; others in a loop of your own, with elementwise=True if they treat every number by itself"
)
parameters_overlap = worded(
    "{first} and {second} overlap in memory, so their optimizer cannot be sharded: shards on several ranks would be "
    "the same numbers; give each memory of its own, as p.data = p.data.clone() does, or shard no optimizer"
)
parameters_are_spread_already = Misuse.worded(
    "{group} has DTensors: what spreads them over other ranks shards the state of the optimizer, too; make the "
    "optimizer of pipe.named_parameters()"
)

# Why optimizers cannot go on with the state in a checkpoint: the complaint in the message of a BadCheckpoint.

state_is_missing = worded("it has no optimizer state of {parameter}, which an optimizer steps here")
optimizers_differ = worded(
    "{parameter} was stepped by {saved} and is stepped by {here} here, which gives their state another meaning: resume "
    "with {saved}; or read the weights alone, with torch.distributed.checkpoint.load into pipe.state_dict()"
)


def schedulers_differ(parameter: str, saved: Sequence[str], here: Sequence[str]) -> str:
    return (
        f"the optimizer of {parameter} had {_schedulers(saved)}, and here it has {_schedulers(here)}: give schedulers= "
        "of the same classes, in the same order"
    )


def _schedulers(names: Sequence[str]) -> str:
    return f"the scheduler{'s' * (len(names) > 1)} {' and '.join(names)}" if names else "no scheduler"


settings_differ = worded(
    "{first} and {other} are in one group of the optimizer, and were saved with different settings ({setting}: "
    "{of_first} and {of_other}): make the groups that there were"
)


def optimizers_were_apart(first: str, other: str, entries: Sequence[str] = ()) -> str:
    """The saved states of two parameters of one optimizer differ, so that it cannot step both.

    They differ in ``entries`` of the optimizer's state, or in the states of their schedulers if there are none.
    """
    how = f"its {', '.join(entries)} differed" if entries else "their schedulers were at different points"
    return (
        f"one optimizer steps {first} and {other}, and when they were saved {how}: make the optimizers that there "
        "were, under the schedule that there was"
    )


# Messages of the state of a pipeline: what cannot be saved or loaded, and files of weights.

NOT_REGULAR = "it is no regular file"
NOT_OF_SAFETENSORS = "and safetensors has tensors alone: choose another suffix"
NOT_WEIGHTS_ONLY = (
    "which torch.load does not read with weights_only=True: keep tensors, numbers, texts, lists or dicts of these there"
)
TORCH_CANNOT_READ = "it is no state dict that torch.load reads with weights_only=True"
NOT_A_STATE_DICT = "it is no state dict: one has tensors by their names, and nothing else"
SAFETENSORS_IS_NOT_INSTALLED = "files of safetensors need a package: pip install safetensors, or choose another suffix"

# ---- parameters, buffers and further state of modules

state_lacks = BadCheckpoint.worded("the state has no {name}, which this rank holds")
parameter_is_unknown = Misuse.worded(
    "{name} of stage {stage} is not a parameter that the pipeline was made with, so nothing would train it: add "
    "adapters, replace modules and call load_state_dict(assign=True) in build_stage; afterwards load with "
    "pipe.load_weights, or load_state_dict without assign, which copy"
)


def file_lacks_parameter(name: str, nearest: list[str]) -> BadCheckpoint:
    hint = f"; the nearest is {nearest[0]}" if nearest else ""
    return BadCheckpoint(f"it has no parameter {name}{hint}")


def stage_refuses_its_state(stage: int, words_of_torch: str) -> BadCheckpoint:
    words = " ".join(line.strip() for line in words_of_torch.splitlines())
    return BadCheckpoint(f"stage {stage} does not take what it has in its own state_dict: {words}")


cannot_be_saved = Misuse.worded("{what} cannot be saved: {error.__class__.__name__}: {error}")
entry_differs_in_file = BadCheckpoint.worded("{name} is {in_file} in it, and {here} in this model")
"""An entry differs from the model's: ``in_file`` and ``here`` are its shapes, or say what it is in each."""

# ---- averages of the weights

average_has_unknown_key = Misuse.worded(
    "{what} has {key!r}: give tensors by the names of pipe.named_parameters(), or modules by the numbers of pipe.stages"
)
average_is_not_of_a_parameter = Misuse.worded(
    "{what} has {name}, which is not a tensor in the shape of a parameter of pipe.named_parameters(): shared= or "
    "of_rank= keep anything else that has a state_dict"
)
average_has_unknown_parameter = Misuse.worded(
    "{what} has the parameter {name} of stage {stage}, which that stage has not"
)

# ---- files of weights

weights_cannot_be_written = BadCheckpoint.worded("{path} cannot be written: {reason}")
directory_is_missing = BadCheckpoint.worded("{path} cannot be written: there is no directory {path.parent}")
entry_cannot_be_exported = BadCheckpoint.worded("{name}, which the model has in its state_dict, is a {kind}, {why}")


def weights_cannot_be_read(error: OSError) -> BadCheckpoint:
    return BadCheckpoint(error.strerror or str(error))


not_safetensors = BadCheckpoint.worded("it is no file of safetensors: {error}")

# Errors of an update: gradients that are left over, and optimizers that do not fit the schedule.

SCALER_WITH_WIDER_SUMS = "a GradScaler unscales grad, not main_grad: scale for fp16, or sum in a wider dtype, not both"
training_of_parameter_changed = Misuse.worded(
    "requires_grad of {name} has changed since the pipeline was made; set it where the stage is made, or make a new "
    "pipeline"
)
gradient_is_still_there = Misuse.worded(
    "{name} still has the gradient of the step before: call optimizer.zero_grad() after optimizer.step(), of an "
    "optimizer that holds pipe.parameters(), or step(accumulate=True) to add to it"
)
gradient_is_of_no_step = Misuse.worded(
    "{name} has a gradient that is of no step of a pipeline, and step(accumulate=True) averages those of steps: add "
    "gradients of your own after the last step that accumulates"
)
gradient_was_stepped = Misuse.worded(
    "{name} still has the gradient with which an optimizer has stepped it, and step(accumulate=True) would add to it: "
    "call zero_grad() after the optimizer's step()"
)
scale_has_changed = Misuse.worded(
    "{name} has a gradient that is scaled by {before:g}, and the scale of the GradScaler is {now:g} now: call "
    "scaler.update() after the last step that accumulates, and zero_grad() after that"
)
means_and_counts = Misuse.worded(
    "{name} has a gradient of a pipeline whose loss is of another kind: losses that return a mean and losses that "
    "return (sum, count) do not accumulate; let both return the same"
)
cleared_in_part = RanksDiffer.worded(
    "{where}: the loop had cleared the gradients of some parameters and kept those of others, and a parameter without "
    "a gradient, on some rank, got its first one: whether the steps before count for it is unknown. Clear all "
    "gradients together, or let optimizers of torch step the parameters; clear by setting to None, and scale or clip "
    "gradients after the last step that accumulates"
)
optimizer_is_missing = Misuse.worded(
    "{scheme} has no flush, so each stage steps inside the schedule: give Pipeline optimizer=, a function that makes "
    "an optimizer of a stage's [(name, parameter), ..]"
)
optimizer_would_not_be_called = Misuse.worded(
    "{scheme} has a flush, so nothing steps inside the schedule: leave out optimizer=, before_step= and after_step=, "
    "and call the step() of an optimizer of your own after each step of the pipeline"
)
not_an_optimizer = Misuse.worded("optimizer returned a {kind}, not a torch.optim.Optimizer")
accumulation_without_flush = Misuse.worded(
    "the stages of {scheme} step inside the schedule, so accumulate=True would come too late: compile the scheme with "
    "more micro-batches to an update"
)
scaler_without_flush = Misuse.worded(
    "the stages of {scheme} step inside the schedule: when one finds infinite gradients, others have made the step "
    "already; train in bfloat16, which needs no scaler"
)
gradient_was_taken_away = Misuse.worded(
    "the gradient of stages.{stage}.{name} was taken away while its update is under way: leave out zero_grad(), the "
    "stages of a stream clear their gradients themselves"
)

# Messages about values that pass between stages, keyword arguments and stages on the meta device.

MICRO_BATCHES_ARE_NOT_ALIKE = (
    "micro-batches that run together differ in structure, or in something that is not a tensor; give all "
    "micro-batches the form of the first"
)

# Memory that stages share.


def memory_was_written(source: int, reader: str, micros: int | tuple[int, ...], verb: str = "handed on") -> BadModel:
    micro = micros[0] if isinstance(micros, tuple) else micros
    return BadModel(
        f"stage {source} {verb} memory for micro-batch {micro} that was written again before {reader} had it; "
        "return a copy, as .clone() makes it, of what a later call writes"
    )


memory_was_returned_twice = BadModel.worded(
    "stage {stage} returned the same memory for micro-batches {earlier} and {micro}, which are both under way; return "
    "a copy, as .clone() makes it, of what a later forward writes"
)

# Keyword arguments.

keyword_is_not_in_the_example = Misuse.worded(
    "{what} has the keyword argument {name} and the example of the pipeline has none of that name, so no stage would "
    "get it: make the pipeline with an example that has all keyword arguments"
)
keyword_is_missing = Misuse.worded(
    "{what} has no keyword argument {name}, and the example of the pipeline has one: give all mini-batches the same "
    "names"
)
keyword_is_not_whole_in_the_example = Misuse.worded(
    '{what} declares whole("{name}"), and the example of the pipeline has {name} without it: declare it in the '
    "example, which decides for all batches"
)
keyword_was_written = BadModel.worded(
    "stage {stage} changes its keyword argument {name} in place, and other stages take it, too; let it work on a copy, "
    "as .clone() makes it"
)
loss_takes_a_keyword = Misuse.worded(
    "loss has a parameter {name}, but keyword arguments are for stages and loss(output, target) gets none: put what "
    "the loss needs into the target, or give Pipeline a loss with two parameters"
)
count_of_target_is_impossible = BadModel.worded(
    "stage {stage}: the count of a target of this update, by the CountedLoss of the stage, is negative or not finite; "
    "return 0 or more"
)
count_is_impossible = BadModel.worded(
    "stage {stage}: the counts that loss returned for an update add up to {count:g}; return (sum, count) with a count "
    "of 0 or more"
)

# Stages on the meta device.

buffer_has_no_values = Misuse.worded(
    "{where} has the buffer {name} on the meta device, which no file of weights has (persistent=False): compute it on "
    'a real device, as under torch.device("cpu")'
)
tensors_have_no_values = Misuse.worded(
    "{names:first 1} of this rank were built on the meta device and have no values: {remedy}"
)

# Outputs of a stage that cannot be sent.

output_is_elsewhere = Misuse.worded(
    "stage {stage} returned a tensor on {place}, and its rank computes on {device}: make what a forward makes on the "
    "device of its input, as in torch.zeros(.., device=x.device)"
)
output_is_not_dense = Misuse.worded(
    "stage {stage} returned a tensor of layout {layout}, which is no message: return a dense one, as to_dense() makes "
    "it"
)
output_is_quantised = Misuse.worded(
    "stage {stage} returned a quantised tensor, of {dtype}, which is no message: return dequantize(), or its "
    "int_repr() and its scale as tensors"
)
dtype_is_not_of_nccl = Misuse.worded(
    "stage {stage} returned a tensor of {dtype}, which the backend nccl cannot send: return it in another dtype, as "
    "torch.int32 or torch.uint8, or use the backend gloo"
)

# Carries.

carry_is_not_returned = BadModel.worded(
    "the forward of {name} has a parameter carry and returned a {kind}; return a pair: its output, and the carry for "
    "the next slice"
)
LOSS_COUNTS_AT_TIMES = "loss returns (sum, count) for one micro-batch and a mean for another"
LOSS_HAS_NO_GRADIENT = (
    "loss returned tensors that need no gradient for all micro-batches of an update, so nothing would be "
    "trained: compute it from the output, without detach(), item() or no_grad()"
)
BACKWARD_OF_PAIR_RAN_TWICE = "the backward of a pair runs once: it was called, or its roots were taken, before"
_RECOMPUTED_STAGES = (
    "a stage that recomputes may depend on its inputs, its weights, what its module holds, and the generators of torch "
    "(those of Python and NumPy only if it draws from them for the first micro-batch, too), but on no clock, file or "
    "global, and its kernels must be deterministic (torch.use_deterministic_algorithms(True)); mend that, or compile "
    "without recomputation"
)
"""The cause of a difference between the two runs of a forward, and what to do."""

keyword_argument_is_missing = BadModel.worded(
    "micro-batch {micro} has no keyword argument {name}, and the first had; give all the same names"
)
tensor_was_unused_at_first = BadModel.worded(
    "stage {stage} uses a tensor that it receives and did not use for the example, or for the first micro-batch of "
    "all: let that one use every tensor; later micro-batches may leave some out"
)
output_differs = BadModel.worded(
    "stage {stage} returned for micro-batch {micro}: {difference}; return the same every time"
)
output_has_no_rows = BadModel.worded(
    "the last stage returned for micro-batches {micros:list} together something that does not have them one after "
    "another in dimension 0, as for the first micro-batch; return the same every time"
)
LEAF_WAS_WRITTEN = (
    "a forward must not write in place into its input, the carry of the slice before, or a parameter: let it work on a "
    "copy, such as x.clone()"
)
SAVED_WAS_WRITTEN = (
    "with several micro-batches under way, the forward of a later one may have written a buffer or a parameter that "
    "the backward of an earlier one needs as it was: let the forward compute with a copy, such as x.clone()"
)
forward_begins_to_write = BadModel.worded(
    "the forward of stage {stage} has written the parameter {name}, which it did not write for the micro-batch at "
    "start, in an evaluation or to see new shapes: its value before is lost, so go on from the last checkpoint; keep "
    "in a buffer (register_buffer) what a forward changes"
)


def carry_is_empty(stage: int, place: int) -> BadModel:
    return BadModel(
        f"stage {stage} returned a carry without tensors for slice {place}, and slice {place + 1} needs one; return "
        "what the next slice must know of this one and of those before it"
    )


carry_differs = BadModel.worded(
    "stage {stage} returned for slice {place} the carry {now}, which was {before} for the first micro-batch; return "
    "the same structure, shapes and dtypes every time"
)
REPORT_HAS_NO_NAME = "report(name, value, count): the name is a text"
report_is_outside = Misuse.worded(
    "report({name!r}, ..) is called outside of a step or an evaluation of a pipeline: call it within the forward of a "
    "stage or within the loss"
)
report_is_no_number = worded("report({name!r}, ..): the {what} is to be a real number, or a tensor of one")
report_has_wrong_count = worded(
    "report({name!r}, ..): the count is {count}, and is to be positive and finite; report nothing for no item"
)
report_had_wrong_count = BadModel.worded(report_has_wrong_count.text)
auxiliary_loss_has_no_gradient = BadModel.worded(
    "the auxiliary loss {name} would have no gradient: it is added under torch.no_grad(), or in a "
    "torch.utils.checkpoint with use_reentrant=True; use use_reentrant=False"
)
auxiliary_loss_is_new = BadModel.worded(
    "stage {stage} has the auxiliary loss {name} for micro-batch {micro}, and had it not for the first; have the same "
    "every time, of 0 where there is nothing to add"
)
backward_of_pair_did_not_run = BadModel.worded(
    "{method} of stage {stage} returned without its backward; call it: `backward()`"
)


class DroppedTensorNeeded(BadModel):
    """A backward needs a tensor that a forward did not save, because it will be run again."""


backward_goes_past_its_forward = DroppedTensorNeeded.worded(
    "stage {stage} goes back into the graph of a forward that is run again for its backward; detach what the module "
    "keeps from one forward to the next"
)
input_was_changed = BadModel.worded(
    "stage {stage} changes an input, a target or a keyword argument in place, or the loop does, but is to run on it "
    "again; let it work on a copy"
)
recomputed_forward_writes_parameter = BadModel.worded(
    "the forward of stage {stage} writes its {names:parameter}, but is to run again for the backward, and would find "
    "other values then: keep in a buffer (register_buffer) what a forward changes, or compile without recomputation"
)
second_run_changes_state = BadModel.worded(
    "stage {stage} changes {names:list} when its forward is run again for the backward, and not at first: "
    + _RECOMPUTED_STAGES
)
second_run_differs = BadModel.worded(
    "stage {stage} gives something else for micro-batch {micro} of update {update} when its forward is run again for "
    "the backward, so that gradients would be wrong: " + _RECOMPUTED_STAGES
)
items_influence_each_other = BadModel.worded(
    "stage {stage} gives something else for micro-batch {micro} of update {update} alone than together with "
    "{others:other}, by more than rounding, so that gradients would be wrong: its items influence each other across "
    "dimension 0, as by batch statistics or a softmax over it, or it depends on how many there are; let each item be "
    "computed by itself, or compile a scheme whose forwards are over one micro-batch each. If that is not so: "
    + _RECOMPUTED_STAGES
)
saved_tensor_was_written = BadModel.worded(
    "stage {stage} saved a tensor of shape {shape} for its backward that was written since, so that gradients would be "
    "wrong; write into a copy, as .clone() makes it"
)
saved_tensor_is_on_the_host = BadModel.worded(
    "stage {stage} goes back into the graph of a forward whose tensors are on the host until its backward; detach what "
    "the module keeps from one forward to the next"
)
norm_is_negative = Misuse.worded("max_norm={max_norm}: a norm is 0 or more")
