"""Plants faults in the engine and around it, one at a time, and checks that the suite notices each.

    OMP_NUM_THREADS=1 python tests/run_mutations.py                    each, with the cheapest tests that should fail
    OMP_NUM_THREADS=1 python tests/run_mutations.py --only "no wait*"  those whose names match
    OMP_NUM_THREADS=1 python tests/run_mutations.py --tests PATH ...   all, with these tests instead: what they notice
    python tests/run_mutations.py --dry                                only find the places; CI runs it

It works in a copy of the tree. A mutation is a regular expression that must match exactly one place in the engine, its
rooms, checks and checkpoints, in whichever file, and what to write there: code may move and be renamed around it. Where
the expression itself no longer matches, the mutation fails as "no place"; then give it the new spelling. First all
tests are run without a mutation, and must pass. A test run that does not end within its time has noticed, too.

To delete a test, show with `--tests` that those that stay notice what it has noticed.
"""

import argparse
import fnmatch
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from list_modules import ROOMS

ROOT = Path(__file__).parents[1]
PATIENCE_S = 300
SCHEDULE = "tests/trace/test_schedule_model.py"
ACCUMULATION = "tests/ranks/test_accumulation.py"
MEMORY = "tests/trace/test_memory.py"
TRAINING = "tests/ranks/test_training.py"
STREAMS = "tests/trace/test_stream_order.py"
SAME_BITS = "tests/ranks/test_same_bits.py"
REPLICAS = "tests/ranks/test_replica_codecs.py"
VIEW = "tests/ranks/test_sharded_view.py"
SITUATIONS = "tests/ranks/test_situations.py"


class Mutation(NamedTuple):
    """Describes a fault: the expression that finds its place, what to write instead, and tests that must notice.

    `pattern` is matched over whole files, with `^` and `$` at each line. `program`: of SITUATIONS, run this one alone.
    """

    name: str
    pattern: str
    replacement: str
    tests: tuple[str, ...]
    program: str = ""


MUTATIONS = (
    # ---- gathers
    Mutation(
        "no wait for a gather",
        r"(work, self\.work = self\.work, None\n) +if work is not None:\n +work\.wait\(\)\n( +del work)",
        r"\1\2",
        (STREAMS, "tests/ranks/test_delays.py"),
    ),
    Mutation(
        "a cast of shards is missed",
        r"for casts in self\.casts:",
        "for casts in self.casts[1:]:",
        (TRAINING,),
    ),
    Mutation(
        "secondary shards are the rows of rank 0",
        r"shape, \(first, last\) = spec\.local_shape\(rank\), spec\.rows\(rank\)",
        "shape, (first, last) = spec.local_shape(rank), spec.rows(0)",
        ("tests/trace/test_late_steps.py",),
    ),
    Mutation(
        "ranks of two shard axes are counted in the wrong order",
        r"rank = rank \* self\.mesh\.size\(axis\) \+ self\.mesh\.get_local_rank\(axis\)",
        "rank = rank + self.mesh.get_local_rank(axis) * (2 if rank or axis else 1)",
        ("tests/trace/test_mesh.py",),
    ),
    Mutation(
        "one group too many is gathered ahead",
        r"if \(spent or not at_least_one\) and spent \+ cost > budget:",
        "if (spent or not at_least_one) and spent > budget:",
        ("tests/unit/test_schedule.py", SCHEDULE),
    ),
    Mutation(
        "nothing is gathered ahead in backward",
        r"for ahead in root\.prefetcher\.in_backward\(self\):",
        "for ahead in [*root.prefetcher.in_backward(self)][:0]:",
        (SCHEDULE,),
    ),
    Mutation(
        "groups gathered ahead in vain stay",
        r"for group in self\.prefetched:",
        "for group in ():",
        (SCHEDULE,),
    ),
    Mutation(
        "secondary shards are not filled",
        r"self\._fill\(\)",
        "pass",
        (TRAINING,),
    ),
    # ---- memory and registration
    Mutation(
        "memory of unsharded parameters is not freed",
        r"(return False\n +self\.is_allocated = False\n) +self\.storage\.resize_\(0\)\n",
        r"\1",
        (MEMORY,),
    ),
    Mutation(
        "sharded parameters are not registered after forward",
        r"(UNSHARDED:\n +self\._set_phase\(GATHERED\)\n +)self\.registration\.register\(unsharded=False\)",
        r"\1pass",
        (TRAINING,),
    ),
    Mutation(
        "parameters that backward needs at once do not stay",
        r"elif choice is None and not keeps:\n( +)keeps = root",
        r"elif choice is False:\n\1keeps = root",
        (SCHEDULE,),
    ),
    Mutation(
        "a hold is ignored between passes",
        r"if until is KeepUntil\.END_OF_USE or \(stays and self\.is_up_to_date\(\)\):",
        "if until is KeepUntil.END_OF_USE:",
        ("tests/trace/test_every_setting.py", "tests/trace/test_evaluation_gathers.py", VIEW),
    ),
    Mutation(
        "version counters of shards are not read",
        r"return tuple\(map\(version_of, self\._sharded\)\)",
        "return (0,) * len(self._sharded)",
        ("tests/ranks/test_evaluation.py", "tests/ranks/test_changes_in_a_pass.py"),
    ),
    Mutation(
        "a gathered copy of changed shards is used",
        r"if self\.registration\.versions\(\) != self\.gathered_versions:\n",
        "if self.gathered_versions is self:\n",
        (VIEW, "tests/ranks/test_changes_in_a_pass.py", "tests/ranks/test_evaluation.py"),
    ),
    Mutation(
        "versions of freed parameters are not bumped",
        r"increment_version\(self\.counted\)",
        "pass",
        ("tests/ranks/test_autograd.py",),
    ),
    Mutation(
        "a saved weight that has changed is not noticed",
        r"if now is not before and now != before:",
        "if now is None:",
        ("tests/ranks/test_changes_in_a_pass.py",),
    ),
    # ---- gradients
    Mutation(
        "the mean is over one rank too many",
        r"divisor = comm\.size if reduction\.divisor is None else reduction\.divisor",
        "divisor = comm.size + 1 if reduction.divisor is None else reduction.divisor",
        ("tests/unit/test_reduce.py", TRAINING),
    ),
    Mutation(
        "the mean between replicas is over the shard group",
        r"reduction\.replicas, reduction\.divisors\(\)\[1\]",
        "reduction.replicas, reduction.divisors()[0]",
        (ACCUMULATION,),
    ),
    Mutation(
        "no wait for a reduction",
        r"^( +)self\._work\.wait\(\)$(?=\n +except RuntimeError)",
        r"\1pass",
        (STREAMS, "tests/unit/test_reduce.py"),
    ),
    Mutation(
        "a bucket is reduced twice",
        r"^( +)self\._process\(gradients\)$",
        r"\1self._process(dict(gradients))\n\1self._process(gradients)",
        (SCHEDULE,),
    ),
    Mutation(
        "a bucket of which a gradient is missing is not reduced",
        r"is_partly_there = \[each for each in self\.buckets if each\.missing < each\.size\]",
        "is_partly_there = []",
        (TRAINING, ACCUMULATION),
    ),
    Mutation(
        "an unsynchronized gradient is lost",
        r"^( +)total = each\.add_\(total\)$",
        r"\1pass",
        (ACCUMULATION,),
    ),
    Mutation(
        "ranks are summed by halves, not by pairs",
        r"halves = parts\[::2\], parts\[1::2\]",
        "halves = parts[: len(parts) // 2], parts[len(parts) // 2 :]",
        (SAME_BITS,),
    ),
    Mutation(
        "a sum that waits for its replicas is lost",
        r"^( +)output\.as_strided\(shard\.shape, strides, layout\.offsets\[i\]\)\.add_\(shard\)$",
        r"\1pass",
        (ACCUMULATION,),
    ),
    Mutation(
        "a sum that waits for its replicas replaces an earlier one",
        r"self\.reduced_in_shard\.setdefault\(i, PartialSums\(\)\)\.add\(shard, self\.leaf\)",
        "self.reduced_in_shard[i] = PartialSums(); self.reduced_in_shard[i].add(shard, self.leaf)",
        (TRAINING,),
    ),
    Mutation(
        "a reset keeps sums that wait for their replicas",
        r"^ +self\.reduced_in_shard\.clear\(\)$",
        "",
        (ACCUMULATION,),
    ),
    Mutation(
        "sums that wait for their replicas stay in flight behind others",
        r"while any\(entry\.pending\.is_partial for entry in self\.running\):",
        "while self.running and self.running[0].pending.is_partial:",
        (ACCUMULATION,),
    ),
    Mutation(
        "gradients replace those of the last backward",
        r"param\.add_to_gradient\(accumulated, gradient\)",
        "sharded.grad = gradient",
        (ACCUMULATION,),
    ),
    Mutation(
        "the last rows of an uneven gradient go to the wrong rank",
        r"first = offset \+ spec\.whole_chunks \* segment",
        "first = offset + (spec.whole_chunks - 1) * segment",
        ("tests/unit/test_reduce.py", TRAINING),
    ),
    Mutation(
        "gradients are summed in the compute dtype",
        r"tuple\(policy\.gradient_dtype\(spec\.delivered_dtype\) for spec in specs\)",
        "tuple(spec.compute_dtype for spec in specs)",
        (SCHEDULE, TRAINING),
    ),
    Mutation(
        "a failed backward leaves its gradients",
        r"(for param in self\._params:\n +)param\.unsharded\.grad = None",
        r"\1pass",
        ("tests/ranks/test_failed_backward.py",),
    ),
    Mutation(
        "any number of reductions may be in flight",
        r"while len\(running\) > self\.max_running and",
        "while len(running) > self.max_running + 1000 and",
        (MEMORY,),
    ),
    Mutation(
        "weighted sums are not divided",
        r"if reduction\.divide_late is not None:",
        "if reduction.divide_late is None:",
        ("tests/ranks/test_accumulate.py",),
    ),
    # ---- dims, dtypes and codecs, which few tests but the matrix of training have
    Mutation(
        "the rest of columns that do not divide is not copied out",
        r"sources\.append\(chunks\[spec\.whole_chunks, : targets\[1\]\.numel\(\)\]",
        "sources.append(chunks[0, : targets[1].numel()]",
        (TRAINING,),
    ),
    Mutation(
        "chunks along another dim are laid out as rows",
        r"chunk = \(spec\.shard_numel,\) if spec\.dim == 0 else spec\.local_shape\(0\)",
        "chunk = (spec.shard_numel,) if spec.dim == 0 else spec.local_shape(0)[::-1]",
        (TRAINING,),
    ),
    Mutation(
        "the sum of two gradients is rounded to the dtype in which they travel",
        r"if rest and first\.dtype == output\.dtype:\n +torch\.add\(first, rest\.pop\(0\), out=output\)",
        "if rest:\n        output.copy_(torch.add(first, rest.pop(0)))",
        (TRAINING,),
    ),
    Mutation(
        "what a codec has not sent is not in the next gradient",
        r"^( +)part\.add_\(residual\)$",
        r"\1pass",
        (TRAINING,),
    ),
    Mutation(
        "what a codec has not sent stays twice",
        r"^( +)residual\.copy_\(lost",
        r"\1residual.add_(lost",
        (TRAINING,),
    ),
    Mutation(
        "what was gathered is computed with before the device has the shards",
        r"^( +)work = copy\.pass_on\(\) if self\._follows else copy\.wait\(\)$",
        r"\1work = None",
        (TRAINING, "tests/trace/test_offload_order.py"),
    ),
    Mutation(
        "the gradient of a scalar is that of the first rank alone",
        r"return gradient\.repeat\(self\.gathered_shape\) if self\.is_scalar else gradient",
        "return gradient.new_zeros(self.gathered_shape).index_fill_(0, gradient.new_zeros(1).long(), gradient.item())"
        " if self.is_scalar else gradient",
        (TRAINING,),
    ),
    Mutation(
        "zeros for unused parameters are not reduced",
        r"unused = \[each for each in self\.buckets if each not in self\._complete_buckets\] if fills else \[\]",
        "unused = []",
        (TRAINING,),
    ),
    Mutation(
        "ranks that use different parameters reduce buckets as they are complete",
        r"if self\.group\.settings\.reduce_unused:\n +return\n",
        "if self.group is None:\n            return\n",
        (TRAINING,),
    ),
    Mutation(
        "replicas that share what rests sum all of it, as HSDP does",
        r"\*how, self\.mesh\.has_outer_shard, now\.divide_late",
        "*how, False, now.divide_late",
        (TRAINING,),
    ),
    # ---- what is in training's choices alone, or in one list of ways
    Mutation(
        "a user's own reduce-scatter is told to sum what it shall average",
        r"op=dist\.ReduceOp\.AVG if averages else dist\.ReduceOp\.SUM,\n +async_op",
        "op=dist.ReduceOp.SUM,\n                async_op",
        (TRAINING,),
    ),
    Mutation(
        "a user's own gather lacks the part of this rank",
        r"part\.copy_\(own\)",
        "pass",
        (TRAINING,),
    ),
    Mutation(
        "what is in flight when a backward fails is delivered later",
        r"self\.queue\.abandon\(self\.backward_pass\)",
        "pass",
        ("tests/ranks/test_failed_backward.py", "tests/ranks/test_faults.py", TRAINING),
    ),
    Mutation(
        "a pass begins with what a failed backward has left",
        r"if self\.backward is not None:\n +self\.recover\(\)  # it has failed",
        "if self.backward is self:\n            self.recover()  # it has failed",
        ("tests/ranks/test_failed_backward.py",),
    ),
    Mutation(
        "gradients of what was frozen, or is no longer, are not followed",
        r"elif parameters\.trainable != self\.registration\.trainable\(\):",
        "elif parameters.trainable == 0:",
        (TRAINING,),
    ),
    Mutation(
        "what was frozen for a later forward alone gets no gradient through an earlier one",
        r"group\.parameters\.follow_if_changed\(\)",
        "pass",
        (ACCUMULATION,),
    ),
    Mutation(
        "checkpointing computes again with weights that a step has changed since",
        r"self\.backward_versions = now\n +self\.reshard\(\)\n",
        "self.backward_versions = now\n",
        (ACCUMULATION,),
    ),
    Mutation(
        "backward computes with other data that was put into a parameter since its forward",
        r"if self\.parameters\.buffers is None or self\.registration\.has_other_data\(\):",
        "if self.parameters is None:",
        (SITUATIONS,),
        program="other_data_between_forward_and_backward",
    ),
    Mutation(
        "what is frozen since its forward gets a gradient",
        r"if i in frozen:\n",
        "if i in ():\n",
        (ACCUMULATION,),
    ),
    Mutation(
        "groups stay unsharded in a backward of several forwards",
        r"root\.forward\.inputs_require_grad or group\.awaits_backward",
        "root.forward.inputs_require_grad",
        (MEMORY,),
    ),
    Mutation(
        "groups stay unsharded in a backward for the input alone",
        r"root\.forward\.inputs_require_grad or group\.awaits_backward",
        "group.awaits_backward",
        (MEMORY,),
    ),
    # ---- codecs and hooks
    Mutation(
        "reductions in flight are limited by what they would be without a codec",
        r"sent = sum\(codecs\[i\]\.sent_nbytes\(specs\[i\]\.shard_numel, dtypes\[i\]\)",
        "sent = sum(specs[i].shard_numel * dtypes[i].itemsize",
        ("tests/trace/test_comm_counts.py",),
    ),
    Mutation(
        "what rounding changes of a sum between replicas is not fed back as often as it adds to it",
        r"alpha=share\n",
        "alpha=1\n",
        (REPLICAS,),
    ),
    Mutation(
        "PowerSGD begins each step with the first matrix",
        r"state\.first if state\.q is None else state\.q",
        "state.first",
        (REPLICAS,),
    ),
    Mutation(
        "the mean of a hook between replicas is taken for the sum that is divided otherwise",
        r"flat\.mul_\(comm\.size / divisor\)",
        "pass",
        ("tests/ranks/test_scatter_hooks.py",),
    ),
    Mutation(
        "a hook on reduced gradients runs before replicas have summed them, too",
        r"layout, comm, divisor = plan\.layout, reduction\.replicas, reduction\.divisors\(\)\[1\]\n",
        r"\g<0>    if reduction.hook is not None:\n        reduction.hook(output)\n",
        ("tests/ranks/test_hsdp.py",),
    ),
    Mutation(
        "what a hook puts into other memory is not taken",
        r"if shard\.data_ptr\(\) != output\.data_ptr\(\) or shard\.dtype != output\.dtype:",
        "if shard is output:",
        ("tests/ranks/test_scatter_hooks.py",),
    ),
    Mutation(
        "rounding at random begins anew when what codecs have kept is loaded",
        r'self\._calls = state\["calls"\]',
        "pass",
        ("tests/ranks/test_codec_state.py",),
    ),
    Mutation(
        "weights that a user has replaced drop what codecs have loaded",
        r"^( +)group\.adopt_replacements\(\)(?=  # else the next forward would)",
        r"\1pass",
        ("tests/ranks/test_codec_state.py",),
    ),
    Mutation(
        "shards are gathered while an optimizer in backward steps on them",
        r"^( +)wait\(running\)(?=  # errors are raised)",
        r"\1pass",
        ("tests/ranks/test_offload.py",),
    ),
    # ---- streams
    Mutation(
        "shards that a sum between replicas takes along are freed early",
        r"self\._in_use = \[\*begun\.inputs, begun\.output, \*carried\.values\(\)\]",
        "self._in_use = [*begun.inputs, begun.output]",
        ("tests/fake_gpu/test_ways.py",),
    ),
    Mutation(
        "a copy to the device does not wait for the stream that had its memory",
        r"self\._inward\.wait_stream\(torch\.accelerator\.current_stream\(self\._device\)\)",
        "pass",
        ("tests/unit/test_transfers.py", "tests/fake_gpu/test_ways.py"),
    ),
    Mutation(
        "the owner stream does not wait for the streams in use",
        r"owner\.wait_stream\(stream\)",
        "pass",
        (STREAMS,),
    ),
    Mutation(
        "shards may be written to while they are copied to the device",
        r"^( +)last\.synchronize\(\)$",
        r"\1pass",
        ("tests/unit/test_transfers.py", "tests/trace/test_offload_order.py"),
    ),
    # ---- rooms, checkpoints, and what strangers have reported
    Mutation(
        "what autograd has saved of weights that have changed may be used",
        r"tuple\(valid \+ 2 \* \(i in changed\) for",
        "tuple(valid + 0 * (i in changed) for",
        ("tests/unit/test_unsharded.py",),
    ),
    Mutation(
        "memory of which user code has a view is freed",
        r"if storage_uses\(self\.storage\._cdata\) > self\._num_uses and not although_viewed:",
        "if self is although_viewed:",
        ("tests/unit/test_unsharded.py",),
    ),
    Mutation(
        "what a forward has left for a reader in backward stays when the next pass begins",
        r"self\.freed_later \|= self\.held_for_backward",
        "pass",
        ("tests/ranks/test_kept_weights.py",),
    ),
    Mutation(
        "the gradient that a hook returns is not taken",
        r"gradient = gradient if replaced is None else param\.adopt_gradient\(replaced, local\.device\)",
        "gradient = gradient",
        ("tests/ranks/test_autograd.py",),
    ),
    Mutation(
        "each piece of an uneven gradient has the last rows of the first piece",
        r"rest = flat\[whole:\]\[first:last\]",
        "rest = flat[whole:][: last - first]",
        ("tests/unit/test_reduce.py",),
    ),
    Mutation(
        "padding that a codec reads is what it was",
        r"segments\.flat\.zero_\(\)",
        "pass",
        ("tests/unit/test_reduce.py",),
    ),
    Mutation(
        "ranks that exchange by a gather take the slices of the first one",
        r"of_all\.view\(self\.size, self\.size, -1\)\[:, self\.rank\]",
        "of_all.view(self.size, self.size, -1)[:, 0]",
        ("tests/ranks/test_any_process_group.py",),
    ),
    Mutation(
        "a sum that is divided otherwise is averaged",
        r"averages = divisor == self\.size and not self\.force_sum(?=\n +if not averages and)",
        "averages = not self.force_sum",
        ("tests/unit/test_coalesced_comm.py", TRAINING),
    ),
    Mutation(
        "each step rounds at random alike",
        r"torch\.Generator\(numbers\.device\)\.manual_seed\(seed\)",
        "torch.Generator(numbers.device).manual_seed(0)",
        ("tests/unit/test_int8.py",),
    ),
    Mutation(
        "each rank rounds at random alike",
        r"zlib\.crc32\(name\.encode\(\)\), 0$",
        "zlib.crc32(name.encode()) << 31, 0",
        ("tests/ranks/test_compressed.py",),
    ),
    Mutation(
        "a piece of a gradient has what the first piece has not sent",
        r"\[:, each\.first : each\.last\] for each in members\]",
        "[:, : each.last - each.first] for each in members]",
        (TRAINING,),
    ),
    Mutation(
        "one rank delivers memory of which something else has a view",
        r"shard = internals\.owned\((shard\.to\(layout\.delivered_dtype\))\)",
        r"shard = \1",
        ("tests/unit/test_reduce.py",),
    ),
    Mutation(
        "feedback is added to the memory of a gradient on one rank",
        r"if codec\.feedback and _share_memory\(packed, gradient\):",
        "if codec.feedback and plan is None:",
        ("tests/unit/test_reduce.py",),
    ),
    Mutation(
        "zeros for unused parameters are sent without what a codec has not sent",
        r"plan\.members\[: len\(inputs\)\], divisor, label\)",
        "plan.members[: len(inputs)] if any(map(torch.any, gradients.values())) else [[]], divisor, label)",
        (TRAINING,),
    ),
    Mutation(
        "what a codec has not sent of a failed pass is in the next gradient",
        r"^( +)encoder\.discard\(\)$",
        r"\1pass",
        ("tests/ranks/test_compressed.py",),
    ),
    Mutation(
        "weights that travel by a codec arrive in the dtype of the first",
        r"place = view_bytes\(self\._unsharded, start, numel, spec\.compute_dtype\)",
        "place = view_bytes(self._unsharded, start, numel, layout.specs[0].compute_dtype)",
        ("tests/ranks/test_compressed.py",),
    ),
    Mutation(
        "what rounding changes of a slice is kept for the first slice",
        r"first = comm\.rank \* slice_numel",
        "first = 0",
        (REPLICAS,),
    ),
    Mutation(
        "secondary shards are encoded once more",
        r"world_size=among, gather_codec=None\)",
        "world_size=among)",
        ("tests/ranks/test_gather_codec.py",),
    ),
    Mutation(
        "writes through a local tensor that a user has are taken for seen",
        r"if self\.are_awaited:\n +self\.are_seen = False",
        "if not self.are_awaited:\n            self.are_seen = False",
        ("tests/ranks/test_offload.py",),
    ),
    Mutation(
        "a checkpoint lacks the rows that do not divide",
        r"chunk = \(length \+ number - 1\) // number",
        "chunk = length // number",
        ("tests/ranks/checkpoint/test_topologies.py",),
    ),
    Mutation(
        "a checkpoint has its name before its index is written",
        r"( +)write_file\(new( / LAYOUT, .+\n +chunks = .+\n +)write_file\(new( / METADATA, chunks\)\n)"
        r"( +replace_folder\(new, save\.final\)\n)",
        r"\4\1write_file(save.final\2write_file(save.final\3",
        ("tests/ranks/checkpoint/test_failures.py",),
    ),
    Mutation(
        "the index of a checkpoint may call any function",
        r"( +)raise _UnknownNameError\(\n( +f\"\.metadata names \{module\})",
        r"\1return super().find_class(module, name)\n\1raise _UnknownNameError(\n\2",
        ("tests/ranks/checkpoint/test_failures.py",),
    ),
    Mutation(
        "files of another save are taken for those of this one",
        r"if found != head:",
        "if found is head:",
        ("tests/ranks/checkpoint/test_failures.py",),
    ),
    Mutation(
        "optimizer states of each rank's own rows are saved once",
        r"if len\(\{\(kind, plain\) for .+:",
        "if len(rows) > 1 << 30:",
        (SITUATIONS,),
        "states_of_local_rows",
    ),
    Mutation(
        "a user's __init_subclass__ runs for the sharded class",
        r"if definer is object:",
        "if definer is not None:",
        (SITUATIONS,),
        "base_classes_that_see_subclasses",
    ),
    Mutation(
        "only what begins where a parameter begins shares its memory",
        r"place\.overlaps\(there\)",
        "(place.start == there.start)",
        ("tests/unit/test_bad_input.py",),
    ),
)


def engine_files(tree: Path) -> Iterator[Path]:
    folders = ("engine", *ROOMS, "torch_private", "features", "checks", "checkpoint")
    return (path for each in folders for path in sorted((tree / "fsdp2" / each).rglob("*.py")))


def find(mutation: Mutation, tree: Path) -> tuple[Path, str]:
    """Returns the file to change, and its text with the fault.

    Raises:
        LookupError: there is no place for it, or there are several.
    """
    pattern = re.compile(mutation.pattern, re.MULTILINE)
    places = [
        (path, text, found)
        for path in engine_files(tree)
        for text in [path.read_text()]
        for found in pattern.finditer(text)
    ]
    if len(places) != 1:
        where = ", ".join(f"{path.name}:{text.count(chr(10), 0, found.start()) + 1}" for path, text, found in places)
        raise LookupError(f"expected one place, found {len(places)} {where}")
    path, text, found = places[0]
    return path, text[: found.start()] + found.expand(mutation.replacement) + text[found.end() :]


def copy_of_tree(folder: Path) -> Path:
    tree = folder / "tree"
    ignore = shutil.ignore_patterns("__pycache__", ".git", ".venv", ".*_cache", "results", "checkpoints")
    shutil.copytree(ROOT, tree, ignore=ignore)
    return tree


def run_tests(tree: Path, tests: Sequence[str], patience: float, program: str = "") -> tuple[bool, str]:
    """Returns whether these tests pass, and else the first that fails."""
    # Bytecode is looked up by time and size: a fault planted within a second of the last could be missed.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)}
    environment["FSDP2_ONLY"] = program
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "-x", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=patience)
    except subprocess.TimeoutExpired:
        return False, f"no end within {patience:.0f} s"
    if done.returncode == 0:
        return True, ""
    if "timeout: rank" in done.stdout or "Failed: Timeout" in done.stdout:
        return False, "a launch has not ended in time: on a busy machine, run it again"
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+.*)", done.stdout, re.MULTILINE)
    return False, failed[
        0
    ] if failed else f"pytest ended with {done.returncode}: {done.stdout[-500:]}{done.stderr[-500:]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="PATTERN", default="*", help="names of mutations, with * for anything")
    parser.add_argument("--tests", nargs="+", metavar="PATH", help="run these instead of each mutation's own")
    parser.add_argument("--patience", type=float, default=PATIENCE_S, metavar="S", help="for one run of tests")
    parser.add_argument("--dry", action="store_true", help="only find the places of the mutations")
    parser.add_argument("--no-baseline", action="store_true", help="do not run the tests without a mutation first")
    args = parser.parse_args()
    chosen = [each for each in MUTATIONS if fnmatch.fnmatch(each.name, args.only)]
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        tree = ROOT if args.dry else copy_of_tree(Path(folder))
        if not args.dry and not args.no_baseline:
            tests = args.tests or sorted({test for each in chosen for test in each.tests})
            passed, problem = run_tests(tree, tests, len(tests) * args.patience)
            if not passed:
                sys.exit(f"without a mutation: {problem}")
        for mutation in chosen:
            try:
                path, text = find(mutation, tree)
            except LookupError as error:
                missed.append(mutation.name)
                print(f"NO PLACE  {mutation.name}: {error}", flush=True)
                continue
            if args.dry:
                continue
            before, began = path.read_text(), time.monotonic()
            path.write_text(text)
            program = "" if args.tests else mutation.program
            passed, problem = run_tests(tree, args.tests or mutation.tests, args.patience, program)
            path.write_text(before)
            if passed:
                missed.append(mutation.name)
            what = f"MISSED    {mutation.name}" if passed else f"noticed   {mutation.name}: {problem}"
            print(f"{what} ({path.name}, {time.monotonic() - began:.0f} s)", flush=True)
    print(f"{len(chosen) - len(missed)} of {len(chosen)} mutations {'have a place' if args.dry else 'were noticed'}")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
