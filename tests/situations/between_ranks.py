"""What ranks must have in common, and parameters that nobody keeps the same on all of them."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1

import fsdp2
from fsdp2 import DataParallelMeshDims
from fsdp2.compression import Compression
from outcomes import EXACT, LOUD, Side
from situations.common import (
    Block,
    Net,
    again_from_a_checkpoint,
    ends,
    hsdp,
    loaded,
    local,
    loss_of,
    sgd,
    shard,
    train,
    weights_of,
)

# ---- parameters that nobody manages

NOT_MANAGED = (
    "Have it there before fully_shard, and out of ignored_params; or freeze it, or average its gradient before each"
)


@ends(LOUD, "stem.weight", advises=NOT_MANAGED, ways=("managed", "frozen"))
def trainable_ignored_parameters(side: Side, way: str = "") -> None:
    """Trainable `ignored_params`"""
    model = Net()
    model.stem.weight.requires_grad_(way != "frozen")
    shard(side, model, ignored_params=None if way == "managed" else {model.stem.weight})
    train(side, model, sgd(model, foreach=False))


@ends(EXACT, follows="trainable_ignored_parameters")
def ignored_parameters_that_the_user_reduces(side: Side) -> None:
    """Trainable `ignored_params` whose gradients the user averages"""
    model = Net()
    shard(side, model, ignored_params={model.stem.weight})
    optimizer = sgd(model, foreach=False)
    for step in range(4):
        loss_of(model(side.batch(step))).backward()
        average_gradients(side, model.stem.weight)
        optimizer.step()
        optimizer.zero_grad()
    side.weights("trained", model)


def average_gradients(side: Side, *params: Tensor) -> None:
    for param in params if side.is_sharded else ():
        dist.all_reduce(param.grad)
        param.grad.div_(side.num_ranks)  # type: ignore[union-attr]


@ends(LOUD, "head.adapter.weight", advises=NOT_MANAGED, ways=("before", "frozen"))
def adapters_added_after_sharding(side: Side, way: str = "") -> None:
    """Adapters added after fully_shard"""
    model = Net()
    if way != "before":
        shard(side, model)
        model(side.batch(9))
    model.head.adapter = nn.Linear(5, 3, bias=False).requires_grad_(way != "frozen")
    model.head.register_forward_hook(lambda head, args, output: output + head.adapter(args[0]))
    if way == "before":
        shard(side, model)
    train(side, model, sgd(model, foreach=False))


def another_head(model: Any, classes: int = 3) -> Any:
    torch.manual_seed(4)
    model.head = nn.Linear(5, classes)
    return model


REPLACED = (
    "Replace or resize modules before fully_shard; or build the model anew with the new one, apply fully_shard, and"
)


@ends(EXACT)
def a_head_that_comes_later_sharded(side: Side) -> None:
    """A module put in place of another, which `fully_shard` was applied to by itself"""
    model = shard(side, Net())
    train(side, model, steps=4, name="before")
    torch.manual_seed(4)
    model.head = nn.Linear(5, 3)
    side.fully_shard(model.head)
    train(side, model, sgd(model, foreach=False), steps=10)


@ends(LOUD, "head.weight", advises=REPLACED, ways=("before", "anew"))
def a_head_replaced_between_looks(side: Side, way: str = "") -> None:
    """A plain module put in place of another behind the fourth step, trained on each rank's gradient"""
    if way == "before":
        return train(side, shard(side, another_head(Net())))
    model = shard(side, Net())
    train(side, model, steps=4, name="before")
    if way:
        rest = {name: value for name, value in weights_of(model).items() if "head" not in name}
        return train(side, loaded(side, shard(side, another_head(Net())), rest, strict=False))
    return train(side, another_head(model), sgd(model, foreach=False), steps=70)


@ends(
    LOUD,
    "no fully_shard call manages it. It was the same on all ranks, and is not any more",
    advises="Apply fully_shard to the module around it; or freeze it, or average its gradient before each step",
    ways=("around", "frozen"),
)
def blocks_sharded_and_no_more(side: Side, way: str = "") -> None:
    """`fully_shard` of the blocks, not of the model around them: its own layers are trained by each rank"""
    model = Net()
    for block in model.blocks:
        side.fully_shard(block)
    if way == "around":
        side.fully_shard(model)
    for layer in (model.stem, model.head):
        layer.requires_grad_(way != "frozen")
    train(side, model, sgd(model, foreach=False), steps=5)


@ends(EXACT, follows="blocks_sharded_and_no_more")
def blocks_sharded_and_the_rest_averaged(side: Side) -> None:
    """The same, where the user averages the gradients of the rest"""
    model = Net()
    for block in model.blocks:
        side.fully_shard(block)
    optimizer = sgd(model, foreach=False)
    for step in range(6):
        loss_of(model(side.batch(step))).backward()
        average_gradients(side, *model.stem.parameters(), *model.head.parameters())
        optimizer.step()
        optimizer.zero_grad()
    side.weights("trained", model)


@ends(LOUD, "no fully_shard call manages it. It was the same on all ranks, and is not any more")
def a_loss_with_an_optimizer_of_its_own(side: Side) -> None:
    """A loss that has weights is not sharded, and an optimizer of its own steps on it"""
    model, loss = shard(side, Net()), nn.Linear(3, 4)
    optimizers = [sgd(model), sgd(loss)]
    for step in range(6):
        loss_of(loss(model(side.batch(step)))).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    side.weights("trained", model)
    side.weights("trained loss", loss)


@ends(EXACT)
def a_loss_with_an_optimizer_of_its_own_averaged(side: Side) -> None:
    """The same, where the user averages its gradients"""
    model, loss = shard(side, Net()), nn.Linear(3, 4)
    optimizers = [sgd(model), sgd(loss)]
    for step in range(6):
        loss_of(loss(model(side.batch(step)))).backward()
        average_gradients(side, *loss.parameters())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    side.weights("trained", model)
    side.weights("trained loss", loss)


# ---- what ranks start from


@ends(
    LOUD,
    "seed",
    advises="Call fsdp2.sync_module_states(model) before fully_shard{}or set the same seed{}or load the weights after",
    ways=("sync", "seed"),
)
def different_seeds(side: Side, way: str = "") -> None:
    """Every rank builds the model from a seed of its own"""
    torch.manual_seed(0 if way == "seed" else side.rank)
    model = Net()
    if way == "sync" and side.is_sharded:
        fsdp2.sync_module_states(model)
    train(side, shard(side, model))


@ends(LOUD, "seed", ranks=4)
def different_replicas(side: Side) -> None:
    """HSDP: every replica builds the model from a seed of its own"""
    torch.manual_seed(side.rank // 2)
    model = shard(side, Net(), **hsdp(side, 2))
    train(side, model)


@ends(EXACT, follows="different_seeds")
def different_seeds_then_loaded(side: Side) -> None:
    """Every rank builds the model from a seed of its own, then loads rank 0's weights"""
    weights = {name: value.clone() for name, value in Net().state_dict().items()}
    torch.manual_seed(side.rank)
    model = shard(side, Net())
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=side.is_sharded)
    set_model_state_dict(model, weights if side.rank == 0 else {}, options=options)
    train(side, model)


@ends(LOUD, "head.bias: ranks had different values of it when fully_shard was called", ranks=4)
def a_new_head_by_rank(side: Side) -> None:
    """A backbone that all ranks have loaded, and a new head that each has seeded by its number"""
    backbone = {name: value.clone() for name, value in Net().state_dict().items() if "head" not in name}
    torch.manual_seed(side.rank)
    model = Net()
    model.load_state_dict(backbone, strict=False)
    with torch.no_grad():
        model.head.weight.fill_(0.5)
    shard(side, model, **hsdp(side, 2))
    side.rows("output", model(side.batch(0)))


@ends(
    LOUD,
    "weight: load_state_dict(..., assign=True) was given whole tensors of different values",
    advises="Load the same on all ranks, or set_model_state_dict(..., broadcast_from_rank0=True)",
    ways=("the same", "broadcast"),
)
def loaded_on_one_rank(side: Side, way: str = "") -> None:
    """`load_state_dict(assign=True)` of a checkpoint on rank 0, of what they have on the others"""
    checkpoint = {name: value * 0.5 for name, value in Net().state_dict().items()}
    model = shard(side, Net())
    side.rows("before", model(side.batch(0)))
    if way == "broadcast" and side.is_sharded:
        loaded(side, model, checkpoint if side.rank == 0 else {}, broadcast_from_rank0=True)
    else:
        model.load_state_dict(checkpoint if side.rank == 0 or way else model.state_dict(), assign=True)
    side.rows("output", model(side.batch(0)))


@ends(
    LOUD,
    advises="Materialise the model before its first forward: model.to_empty(device={}), then initialise or load.",
    ways=("initialise", "load"),
    only_ours=True,
)
def parameters_left_on_meta(side: Side, way: str = "") -> None:
    """Built on meta, and trained"""
    weights = Net().state_dict()
    with torch.device("meta" if side.is_sharded else "cpu"):
        model = Net()
    shard(side, model)
    if side.is_sharded and way:
        model.to_empty(device="cpu")
    if way == "load":
        loaded(side, model, weights)
    for parameter in model.parameters() if way == "initialise" else ():
        nn.init.constant_(parameter, 0.1)
    train(side, model)


def initialised_on_meta(side: Side, **options: Any) -> None:
    with torch.device("meta" if side.is_sharded else "cpu"):
        model = Net()
    shard(side, model, **options)
    if side.is_sharded:
        model.to_empty(device="cpu")
    torch.manual_seed(3)
    for parameter in model.parameters():
        nn.init.normal_(parameter) if parameter.dim() > 1 else nn.init.uniform_(parameter, -1, 1)
    side.weights("initialised", model)
    train(side, model)


@ends(EXACT)
def random_initialisation_of_shards(side: Side) -> None:
    """Built on meta, random weights given to the shards on a CPU mesh"""
    initialised_on_meta(side)


@ends(EXACT, ranks=4)
def random_initialisation_of_replicas(side: Side) -> None:
    """The same on a mesh of replicas"""
    initialised_on_meta(side, **hsdp(side, 2))


@ends(LOUD, "head.weight", advises="Initialise or load it before the first forward", ways="initialise")
def memory_that_nobody_initialised(side: Side, way: str = "") -> None:
    """Built on meta, with weights that nobody initialises"""
    with torch.device("meta" if side.is_sharded else "cpu"):
        model = Net()
    shard(side, model)
    if side.is_sharded:
        model.to_empty(device="cpu")
    for name, parameter in model.named_parameters():
        if name != "head.weight" or way:
            nn.init.constant_(parameter, 0.1)
    train(side, model)


def fill_buffers(model: Any) -> None:
    model.places.copy_(torch.tensor([4, 3, 2, 1, 0]))
    model.scale.fill_(2.0)


class Unsaved(Net):
    """Its inputs are permuted and scaled by buffers that no state dict holds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", torch.tensor([4, 3, 2, 1, 0]), persistent=False)
        self.register_buffer("scale", torch.full((5,), 2.0), persistent=False)

    def features(self, x: Tensor) -> Tensor:
        return super().features(x[:, self.places] * self.scale)  # type: ignore[index, operator]


@ends(
    LOUD,
    "places on meta",
    advises="then initialise or load; or assign what the state dict that was loaded lacks",
    ways="assign",
)
def buffers_left_on_meta(side: Side, way: str = "") -> None:
    """Built on meta, all that the state dict has assigned: buffers are not in it"""
    weights = {name: value.clone() for name, value in Unsaved().state_dict().items()}
    with torch.device("meta" if side.is_sharded else "cpu"):
        model = Unsaved()
    shard(side, model).load_state_dict(weights, assign=True)
    if way:
        model.places, model.scale = torch.tensor([4, 3, 2, 1, 0]), torch.full((5,), 2.0)
    train(side, model)


@ends(
    LOUD,
    "places: to_empty",
    advises="Initialise or load it before the first forward; a buffer that no",
    ways="initialise",
)
def buffers_that_nobody_initialised(side: Side, way: str = "") -> None:
    """The same given memory and loaded: what the state dict does not hold keeps what that memory held"""
    weights = {name: value.clone() for name, value in Unsaved().state_dict().items()}
    with torch.device("meta" if side.is_sharded else "cpu"):
        model = Unsaved()
    shard(side, model)
    if side.is_sharded:
        model.to_empty(device="cpu")
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))
    if way:
        fill_buffers(model)
    train(side, model)


@ends(LOUD, "ascending order")
def mesh_in_another_order(side: Side) -> None:
    """The mesh lists its ranks in another order; weights are initialised after sharding"""
    options = {"mesh": DeviceMesh("cpu", [1, 0])} if side.is_sharded else {}
    model = side.fully_shard(nn.Linear(5, 4).double(), **options)
    torch.manual_seed(1)
    nn.init.normal_(model.weight)
    train(side, model)


class Heads(nn.Module):
    """Heads by name, of which forward uses one."""

    def __init__(self, names: str) -> None:
        super().__init__()
        self.stem, made = nn.Linear(5, 5), {name: nn.Linear(5, 3) for name in "ab"}
        self.heads = nn.ModuleDict({name: made[name] for name in names})

    def forward(self, x: Tensor) -> Tensor:
        return self.heads["a"](self.stem(x))


@ends(
    LOUD,
    "ranks register their modules in another order",
    advises="Register modules in the same order on all ranks (of names in a set: in that of sorted(names)), and call",
    ways=("sorted", "registered again"),
)
def heads_in_another_order(side: Side, way: str = "") -> None:
    """Ranks register modules in another order, and load weights by name; evaluation"""
    weights = Heads("ab").state_dict()
    names = "ba" if side.rank == 1 else "ab"
    model = Heads("".join(sorted(names)) if way == "sorted" else names)
    if way == "registered again":
        model.heads = nn.ModuleDict({name: model.heads[name] for name in sorted(names)})
    side.fully_shard(model)
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=side.is_sharded))
    with torch.no_grad():
        side.rows("output", model(side.batch(0)))


@ends(
    LOUD,
    "expected the same on all ranks, got the shape (3, 5) on rank 0, and the shape (4, 5) on rank 1",
    advises="{}; if a size depends on data that a rank reads (a vocabulary), take one rank's on all of them",
    ways="one rank's",
)
def another_number_of_classes(side: Side, way: str = "") -> None:
    """Ranks build a head for the number of classes that each has found in its own rows"""
    classes = [3 + (side.rank if side.is_sharded else 0)]
    if way and side.is_sharded:
        dist.broadcast_object_list(classes)
    model = another_head(Net(), classes[0])
    shard(side, model)
    side.rows("output", model(side.batch(0))[:, :3])


@ends(
    LOUD,
    advises="and call fully_shard on the same modules, with the same ignored_params",
    ways="the same",
    only_ours=True,
)
def ignored_on_one_rank(side: Side, way: str = "") -> None:
    """One rank ignores the parameters of a frozen layer"""
    model = Net()
    model.head.requires_grad_(False)
    ignores = way or side.rank == 0
    train(side, shard(side, model, ignored_params={*model.head.parameters()} if ignores else None))


@ends(LOUD, advises="Call fully_shard on the same modules on all ranks", ways="the same", only_ours=True)
def blocks_sharded_on_one_rank(side: Side, way: str = "") -> None:
    """One rank shards the blocks by themselves"""
    model = Net()
    train(side, shard(side, model) if way or side.rank == 0 else side.fully_shard(model))


@ends(
    LOUD,
    "FullyShardedDataParallel wraps the module that has it",
    advises="Leave FullyShardedDataParallel out, and call fully_shard on the module instead; or, if it is to stay, put "
    "its parameters into ignored_params",
    ways=("instead", "ignored", "ignored, flat"),
)
def fsdp1_inside(side: Side, way: str = "") -> None:
    """One layer is wrapped in FSDP1"""
    model: Any = Net()
    for param in model.head.parameters():  # parts of all ranks are the same before they are trained
        nn.init.constant_(param, 0.1)
    ignored = None
    if side.is_sharded and way != "instead":
        cpu = torch.device("cpu")
        model.head = FSDP1(model.head, device_id=cpu, use_orig_params=way != "ignored, flat")
        ignored = {*model.head.parameters()} if way else None
    shard(side, model, ignored_params=ignored)
    optimizer = sgd(model, foreach=False)
    assert not side.is_sharded or not fsdp2.check(model, optimizer)
    for step in range(9):
        loss_of(model(side.batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    side.rows("output", model(side.batch(0)))


# ---- ranks that are not in the same place


class Towers(nn.Module):
    """Rows go through a tower of their rank's choice, or through none, then through a head."""

    def __init__(self, side: Side, widths: tuple[int, int], **options: Any) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.Sequential(nn.Linear(5, w), nn.Tanh(), nn.Linear(w, 5)) for w in widths)
        self.head = nn.Linear(5, 3)
        for tower in self.towers:
            side.fully_shard(tower, **options)
        side.fully_shard(self)

    def forward(self, x: Tensor, tower: int | None) -> Tensor:
        return self.head(x if tower is None else self.towers[tower](x))


def train_by_rank(side: Side, model: nn.Module, choices: tuple[Any, Any]) -> None:
    """Each rank's rows with its own choice: on the plain side, both, one after the other."""
    optimizer = sgd(model)
    for step in range(2):
        parts = side.parts(2, step)
        for rank, rows in parts:
            (loss_of(model(rows, choices[rank])) / len(parts)).backward()
        optimizer.step()
        optimizer.zero_grad()
    side.weights("trained", model)


@ends(LOUD, "towers")
def ranks_in_different_modules(side: Side) -> None:
    """Two ranks call different sharded modules of equal shapes"""
    train_by_rank(side, Towers(side, (7, 7)), (0, 1))


@ends(
    LOUD,
    "gradients that travel in",
    only_ours=True,
    advises="Build and set up the model by the same code on all ranks",
    ways="the same",
)
def codecs_that_differ(side: Side, way: str = "") -> None:
    """One rank encodes its gradients, and another sends them as they are"""
    codec = torch.bfloat16 if side.rank == 0 and not way else None
    options = (
        {"mp_policy": fsdp2.MixedPrecisionPolicy(compression=Compression(reduce_scatter=codec))}
        if side.is_sharded
        else {}
    )
    train(side, shard(side, Net(), **options))


CONDITIONAL = "pass conditional=True to its fully_shard call, or call its set_conditional() before the first forward"


@ends(LOUD, advises=CONDITIONAL)
def a_module_skipped_on_one_rank(side: Side) -> None:
    """A sharded module is skipped on one rank"""
    train_by_rank(side, Towers(side, (7, 9)), (0, None))


@ends(EXACT, only_ours=True, follows="a_module_skipped_on_one_rank")
def conditional_modules(side: Side) -> None:
    """Both, with `fully_shard(..., conditional=True)`"""
    for choices in ((0, 1), (0, None)):
        model = Towers(side, (7, 9), **({"conditional": True} if side.is_sharded else {}))
        train_by_rank(side, model, choices)


@ends(EXACT, only_ours=True, follows="conditional_too_late")
def conditional_by_a_setting(side: Side) -> None:
    """Both, with `set_conditional` after `fully_shard`"""
    for choices in ((0, 1), (0, None), (None, None)):
        model = Towers(side, (7, 9))
        for tower in model.towers if side.is_sharded else ():
            tower.set_conditional()
        train_by_rank(side, model, choices)


@ends(LOUD, "set_conditional()", only_ours=True)
def conditional_no_more(side: Side) -> None:
    """The same, taken back"""
    model = Towers(side, (7, 9))
    if side.is_sharded:
        for tower in model.towers:
            tower.set_conditional()
        for tower in model.towers:
            tower.set_conditional(False)
    train_by_rank(side, model, (0, None))


@ends(LOUD, "set_conditional comes too late", only_ours=True, advises="Call it before the first forward, on all ranks")
def conditional_too_late(side: Side) -> None:
    """`set_conditional` after a step"""
    model = Towers(side, (7, 9))
    train_by_rank(side, model, (0, 0))
    if side.is_sharded:
        model.towers[0].set_conditional()


@ends(
    LOUD,
    advises="and can't be conditional: ranks that leave it out have no part to keep. Pass a bool, or None",
    ways="a bool",
    ranks=4,
    only_ours=True,
)
def conditional_and_kept_in_part(side: Side, way: str = "") -> None:
    """`set_conditional` of a module that keeps a part of its parameters on few ranks"""
    model = shard(side, Net(), reshard_after_forward=bool(way) or 2)
    if side.is_sharded:
        model.blocks[0].set_conditional()
    train(side, model)


@ends(LOUD, "set_conditional(True) of towers.0", only_ours=True)
def conditional_on_one_rank(side: Side) -> None:
    """`set_conditional` on one rank only"""
    model = Towers(side, (7, 9))
    if side.is_sharded and side.rank == 1:
        model.towers[0].set_conditional()
    train_by_rank(side, model, (0, 0))


class WithImages(nn.Module):
    """A tower of layers that are sharded one by one, as accelerate does, and its projection in the root's group."""

    def __init__(self, side: Side, is_frozen: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.projection, self.text = nn.Linear(5, 5), Net()
        self.layers.requires_grad_(not is_frozen)
        if side.is_sharded:
            for each in (*self.layers, *self.text.blocks):
                side.fully_shard(each)
            side.fully_shard(self)
            for layer in self.layers:
                layer.set_conditional()
            self.set_reduce_scatter_unused_params(True)

    def forward(self, x: Tensor, has_image: bool) -> Tensor:
        image = x
        for layer in self.layers if has_image else ():
            image = layer(image)
        return self.text(x + self.projection(image) if has_image else x)


@ends(EXACT, only_ours=True)
def a_rank_without_images(side: Side) -> None:
    """A tower, trained and frozen, that one rank leaves out; accelerate has sharded its layers only"""
    for is_frozen in (False, True):
        train_by_rank(side, WithImages(side, is_frozen), (True, False))


class Branches(nn.Module):
    """Two of equal shapes in one group, of which each rank uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 3)])

    def forward(self, x: Tensor, branch: int) -> Tensor:
        return self.branches[branch](x)


@ends(LOUD, advises="If ranks use different parameters of one group, call set_reduce_scatter_unused_params(True)")
def ranks_use_different_parameters(side: Side) -> None:
    """Ranks use different parameters, of equal shapes, of one group"""
    train_by_rank(side, side.fully_shard(Branches()), (0, 1))


@ends(EXACT, follows="ranks_use_different_parameters")
def unused_parameters_reduced(side: Side) -> None:
    """The same with `set_reduce_scatter_unused_params(True)`"""
    model = side.fully_shard(Branches())
    if side.is_sharded:
        model.set_reduce_scatter_unused_params(True)
    train_by_rank(side, model, (0, 1))


ALIKE = "Set requires_grad alike on all ranks, before the forward"


@ends(LOUD, "set_reduce_scatter_unused_params")
def replicas_use_different_parameters(side: Side) -> None:
    """Replicas use different parameters, of equal shapes, of one group"""
    train_by_rank(side, side.fully_shard(Branches(), **hsdp(side, 1)), (0, 1))


@ends(LOUD, "ranks are out of step", ranks=4)
def rank_of_one_replica_out_of_step(side: Side) -> None:
    """HSDP: one rank evaluates once more than the others"""
    model = shard(side, Net(), **hsdp(side, 2))
    with torch.no_grad():
        for _ in range(2 if side.is_sharded and side.rank == 0 else 1):
            model(side.batch(1))
    train(side, model)


@ends(
    LOUD,
    "requires_grad differs between ranks: it is True on rank 0",
    advises=f"so they would reduce different gradients. {ALIKE}",
    ways="alike",
)
def a_layer_frozen_on_one_rank(side: Side, way: str = "") -> None:
    """One rank freezes a layer"""
    model = shard(side, Net())

    def training(alike: bool) -> None:
        model.stem.requires_grad_(alike or side.rank == 0)
        train(side, model)

    again_from_a_checkpoint(side, model, training) if way else training(False)


@ends(
    LOUD,
    "parameters are trainable on rank",
    advises=f"parameters are trainable on rank {{}}, and {{}} on rank {{}}. {ALIKE}",
    ways="alike",
    only_ours=True,
)
def a_layer_trained_on_one_rank_later(side: Side, way: str = "") -> None:
    """A frozen layer is trained on one rank from the fifth step on, which is no step at which ranks compare"""
    model = shard(side, Net())
    model.blocks[1].requires_grad_(False)
    train(side, model, steps=4, name="before")

    def training(alike: bool) -> None:
        model.blocks[1].requires_grad_(alike or side.rank == 0)
        train(side, model)

    again_from_a_checkpoint(side, model, training) if way else training(False)


@ends(
    LOUD,
    "has written to this frozen parameter since ranks last compared it",
    advises="so each rank's part is of another model now. Load a checkpoint of before, and write to the parameter",
    ways=("in place", "to_local", "data"),
)
def a_frozen_layer_written_on_one_rank(side: Side, way: str = "") -> None:
    """One rank writes to a frozen layer"""
    model = Net()
    model.stem.requires_grad_(False)
    shard(side, model)
    train(side, model, steps=1, name="before")

    def training(alike: bool) -> None:
        weight = model.stem.weight
        with torch.no_grad():
            if alike or (side.rank == 0 and side.is_sharded):
                ({"to_local": local(weight), "data": weight.data}.get(way, weight)).mul_(0.5)
        train(side, model, steps=9)

    again_from_a_checkpoint(side, model, training) if way else training(False)


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)

    def features(self, x: Tensor) -> Tensor:
        return self.norm(super().features(x))


@ends(
    LOUD,
    "Is norm in training mode on some ranks only",
    advises="Call its train() or eval() alike on all ranks",
    ways="eval",
)
def norm_frozen_on_one_rank(side: Side, way: str = "") -> None:
    """BatchNorm frozen on one rank"""
    model = shard(side, Normed())
    model.norm.train(side.rank == 0 and not way)
    train(side, model)


@ends(LOUD, "each axis once", only_ours=True, advises="Leave it out of one", ways=("shard", "replicate"))
def one_axis_shards_and_replicates(side: Side, way: str = "") -> None:
    """`DataParallelMeshDims` with one axis for both"""
    dims = {"shard": "data", "replicate": "data"}
    options: dict[str, Any] = {}
    if side.is_sharded:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
        named = DataParallelMeshDims(**{name: axis for name, axis in dims.items() if way in ("", name)})
        options = {"mesh": mesh, "dp_mesh_dims": named}
    train(side, shard(side, Net(), **options))


@ends(
    LOUD, only_ours=True, advises="Call finalize_backward() on the root first, also before clipping", ways="finalized"
)
def step_before_finalization(side: Side, way: str = "") -> None:
    """After `set_manual_backward_finalization(True)`, a step before `finalize_backward`"""
    model = shard(side, Net())
    if side.is_sharded:
        model.set_manual_backward_finalization(True)
    optimizer = sgd(model)
    for step in range(3):
        loss_of(model(side.batch(step))).backward()
        if way:
            if side.is_sharded:
                model.finalize_backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    side.weights("trained", model)


FROM_BEFORE = "so each rank's part is of another model now. Have all ranks"


@ends(
    LOUD,
    advises=(
        FROM_BEFORE,
        "decide alike whether to step (all-reduce what that depends on), and load a checkpoint of before",
    ),
    ways="alike",
)
def step_left_out_on_one_rank(side: Side, way: str = "") -> None:
    """A step left out on one rank"""
    model = shard(side, Net())

    def training(alike: bool) -> None:
        optimizer = sgd(model)
        for step in range(5):
            loss_of(model(side.batch(step))).backward()
            steps = torch.tensor(float(step != 1 or side.rank == 0))
            if alike and side.is_sharded:
                dist.all_reduce(steps, op=dist.ReduceOp.MIN)
            elif alike:
                steps.fill_(step != 1)
            if steps:
                optimizer.step()
            optimizer.zero_grad()
        side.weights("trained", model)

    again_from_a_checkpoint(side, model, training) if way else training(False)


@ends(LOUD, advises="choose alike (all-reduce what that depends on), and load a checkpoint of before", ways="alike")
def learning_rate_of_own_loss(side: Side, way: str = "") -> None:
    """A scheduler of learning rates that follows each rank's own loss"""
    model = shard(side, Net())

    def training(alike: bool) -> None:
        optimizer = sgd(model)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.05)
        for step in range(9):
            loss = loss_of(model(side.batch(step)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mean = loss.detach().clone()
            if alike and side.is_sharded:
                dist.all_reduce(mean)
                mean /= side.num_ranks
            scheduler.step(mean.item())
        side.weights("trained", model)

    again_from_a_checkpoint(side, model, training) if way else training(False)


@ends(LOUD, advises="Call set_gradient_divide_factor on all ranks, with the same factor", ways="all ranks")
def divisors_that_differ(side: Side, way: str = "") -> None:
    """`set_gradient_divide_factor` on one rank"""
    model = shard(side, Net())
    if side.is_sharded and (way or side.rank == 1):
        model.set_gradient_divide_factor(4.0, recurse=True)
    optimizer = sgd(model)
    for step in range(3):
        loss = loss_of(model(side.batch(step)))
        (loss * 2 if way and side.is_sharded else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    side.weights("trained", model)
