"""Find out by a trial what an attention of transformers does, without a list of names.

Such a class projects queries, keys and values, hands them to a function that ``ALL_ATTENTION_FUNCTIONS`` names, and
projects the heads that it gets back. :func:`try_on_meta` runs a copy without numbers on the device ``meta``. The graph
of autograd then tells which children project, and what else the forward does with their outputs. Anything else than
the above is a reason to refuse the module.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from mmgate.errors import ConfigError
from mmgate.layers.base.gated import CHILD, RECORD, host_class, is_on

INTERFACE = 'ALL_ATTENTION_FUNCTIONS'
TRIAL = 'mmgate-trial'  # the attention implementation of a trial
# what a forward may hand to the function beside heads and masks; sliding windows are part of a mask
HANDED = {'attention_mask', 'dropout', 'scaling', 'is_causal', 'output_attentions', 'sliding_window'}
# nodes of autograd that move numbers and change none
MOVES = {
    *('View', 'UnsafeView', 'ReshapeAlias', 'Transpose', 'Permute', 'T', 'Clone', 'ToCopy', 'Alias', 'Squeeze'),
    *('Unsqueeze', 'Unbind', 'Split', 'SplitWithSizes', 'Select', 'Slice', 'Cat', 'Stack', 'Expand', 'Repeat'),
}
# origins of a value beside the names of projections: other nodes, and the attention function
CHANGE = 'changed'
HEADS = 'heads'

# Inputs of a trial: images of so many tokens, in one row or as a map.
SIDE = 16
SHAPES = ((2, SIDE * SIDE), (2, SIDE, SIDE))
POSITIONS = 'position_embeddings'  # the argument of positions, or of cosines and sines that rotate heads
NUMBERS = ('height', 'width')  # arguments that are the map's sides


class OtherTokensError(ValueError):
    """Error: an attention attends between other tokens than its projections have read, for instance with a cache."""


@dataclass(frozen=True)
class Trial:
    """Result of trying an attention's forward without numbers.

    Attributes:
        query: The child that projects queries.
        key: The child that projects keys.
        value: The child that projects values; one child may project all three.
        output: The child that projects the heads.
        heads: Number of heads H.
        head_dim: Their width d.
        dropout: The rate that the forward hands to its attention function in training.
        changes: True if queries or keys are changed between their projection and the attention, as by a rotation.
    """

    query: str
    key: str
    value: str
    output: str
    heads: int
    head_dim: int
    dropout: float
    changes: bool

    @property
    def projections(self) -> tuple[str, str, str]:
        """The names of the children that project query, key and value."""
        return self.query, self.key, self.value


def goes_through_interface(kind: type[nn.Module]) -> bool:
    """Return True if an attention class calls ALL_ATTENTION_FUNCTIONS, the attention interface of transformers."""
    known: Any = kind
    return _names_functions(known)


@cache
def _names_functions(kind: Any) -> bool:
    forward = getattr(kind, 'forward', None)  # a scripted module's class has none
    code = None if forward is None else getattr(inspect.unwrap(forward), '__code__', None)
    return code is not None and INTERFACE in code.co_names


def input_of_heads(x: Tensor, heads: Tensor, name: str) -> Tensor:
    """Return the input of a projection as ``(B, N, C)``, like the heads ``(B, H, N, d)`` that became of it.

    Raises:
        OtherTokensError: The heads are more than those that this call has projected, as with a cache, or queries are
            pooled.
    """
    tokens = (heads.shape[0], heads.shape[2])
    if x.numel() != tokens[0] * tokens[1] * x.shape[-1]:
        raise OtherTokensError(
            f'{tokens[0]} x {tokens[1]} heads, but {x.numel() // x.shape[-1]} tokens projected by {name}. '
            'A gate reads what belongs to each head, so call the model without a cache and without pooled '
            'queries'
        )
    return x if x.shape[:-1] == tokens else x.reshape(*tokens, x.shape[-1])


_TRIED: dict[Any, Trial | str] = {}


def try_on_meta(host: nn.Module) -> Trial:
    """Try an attention's forward on the device ``meta``, and return what it does; the result is cached.

    Modules of one class, of the same sizes and with the same numbers as attributes are tried once.

    Args:
        host: The attention, gated or not.

    Raises:
        ConfigError: It does something else than this module's first lines say.
    """
    config = getattr(host, 'config', None)
    if not hasattr(config, '_attn_implementation'):
        raise ConfigError(f'A {host_class(host).__name__} has no config that names its attention function.')
    gate = CHILD if is_on(host) else None
    parts = [part for name, part in host.named_modules() if name.partition('.')[0] != gate]
    numbers = [
        (name, repr(one))
        for holder in (*parts, config)
        for name, one in vars(holder).items()
        if isinstance(one, (int, float, str, tuple)) and name != 'training' and name[0] != '_'
    ]
    sizes = [(name, tuple(one.shape)) for name, one in host.named_parameters() if name.partition('.')[0] != gate]
    key = (host_class(host), *map(type, parts[1:]), *sizes, *numbers)
    if key not in _TRIED:
        try:
            _TRIED[key] = _try(host)
        except ConfigError as error:
            _TRIED[key] = str(error)
    found = _TRIED[key]
    if isinstance(found, str):
        raise ConfigError(found)
    return found


def _try(host: Any) -> Trial:
    name = f'A {host_class(host).__name__}'
    failures = []
    # The graph is kept inside a user's inference mode, too.
    with torch.inference_mode(False), torch.enable_grad():
        copied = _on_meta(host)
        run = copied.trial = _Run(copied)
        for calls in _calls(copied):
            found = []
            for arguments in calls:
                run.start()
                try:
                    copied(**arguments)
                    if run.calls:
                        found.append(run.result())
                    else:
                        failures.append('has not called its attention function')
                except ConfigError as error:
                    raise ConfigError(f'{name} {error}.') from error
                except OtherTokensError as error:
                    failures.insert(0, f'attends between other tokens than it projects: {error}')
                except Exception as error:  # whatever a forward may raise on arguments of other shapes
                    lines = str(error).strip().splitlines() or ['']
                    failures.append(f'does not run in a trial ({type(error).__name__}: {lines[0][:200]})')
            if len({replace(one, changes=True) for one in found}) > 1:
                raise ConfigError(f'{name} projects by other children, or other heads, with other arguments.')
            if found:
                return replace(found[0], changes=any(one.changes for one in found))
    raise ConfigError(f'{name} {failures[0] if failures else "has no linear layers"}.')


def _on_meta(host: Any) -> Any:
    """Return a vanilla copy of a module on the device ``meta`` (shapes without values), in eval mode, without hooks."""
    left_out = (CHILD, RECORD) if is_on(host) else ()
    memo: dict[int, Any] = {id(getattr(host, name)): None for name in left_out}
    for parameter in host.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device='meta'), requires_grad=False)
    memo.update({id(buffer): torch.empty_like(buffer, device='meta') for buffer in host.buffers()})
    copied = deepcopy(host, memo)
    copied.__class__ = host_class(host)
    copied.config._attn_implementation = TRIAL
    for module in copied.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
        # A hook of accelerate's, which moves inputs to its device.
        vars(module).pop('forward', None)
    return copied.eval()


def _calls(host: nn.Module) -> Iterator[list[dict[str, Any]]]:
    """Yield the arguments of several calls for each shape of the input: those needed, then each of the others too."""
    taken = [*inspect.signature(host.forward).parameters.values()]
    named = [one for one in taken if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    needed = [one for one in named if one.default is one.empty]
    further = [one for one in named if one.default is not one.empty]
    linear: list[Any] = [child for child in host.children() if hasattr(child, 'in_features')]
    head: Any = getattr(host, 'head_dim', getattr(host, 'attention_head_size', None))

    def made(*shape: int) -> Tensor:
        return torch.empty(shape, device='meta', dtype=linear[0].weight.dtype)

    def values(one: inspect.Parameter) -> list[Any]:
        if one.name in NUMBERS:
            return [SIDE]
        if isinstance(one.default, bool):
            return [not one.default]
        rotations = ((SIDE * SIDE,), (SIDE,), (1, SIDE * SIDE)) if one.name == POSITIONS and head else ()
        return [*states, *((made(*tokens, head),) * 2 for tokens in rotations)]

    for shape in SHAPES:
        states = [made(*shape, width) for width in sorted({child.in_features for child in linear})]
        calls = [dict(zip((one.name for one in needed), given, strict=True)) for given in product(*map(values, needed))]
        yield [*calls, *({**call, one.name: value} for call in calls for one in further for value in values(one))]


class _Run:
    """Run of a forward in a trial, which notes what the heads come from.

    What a child returns is cut off the graph of autograd, so that the graph of a value ends at the children, or at the
    attention function, that it comes from.

    Attributes:
        origins: By the id of such an end, the end and what it comes from: names of projections, :data:`CHANGE` and
            :data:`HEADS`.
        inputs: The input of each projection.
        outputs: The projections that read the heads.
        calls: The arguments of each call of the attention function.
    """

    def __init__(self, host: nn.Module) -> None:
        self.host = host
        for name, child in host.named_children():
            child.register_forward_hook(partial(self.end_at_child, name), with_kwargs=True)
        self.start()

    def start(self) -> None:
        """Forget the run before."""
        self.host.training = False
        self.origins: dict[int, tuple[Tensor, set[str]]] = {}
        self.inputs: dict[str, Tensor] = {}
        self.outputs: set[str] = set()
        self.calls: list[tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]] = []

    def end_at_child(self, name: str, child: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Let the graph end at the output of a child; a forward hook."""
        given = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
        origins = set().union(*map(self.origins_of, given))
        if hasattr(child, 'in_features'):
            self.inputs[name] = given[0]
            if HEADS in origins:
                self.outputs.add(name)
            else:
                # The rate of dropout is handed over in training. A whole forward in training may take other numbers of
                # tokens, such as LW-DETR's groups of queries.
                self.host.training = True
            origins = {name}
        return self.end(output, origins) if origins and isinstance(output, Tensor) else output

    def end(self, value: Tensor, origins: set[str]) -> Tensor:
        """Return a value as an end of the graph, and note what it comes from."""
        value = value.detach().requires_grad_()
        self.origins[id(value)] = value, origins
        return value

    def origins_of(self, value: Tensor) -> set[str]:
        """Return what a value comes from."""
        if id(value) in self.origins:
            return self.origins[id(value)][1]
        found: set[str] = set()
        nodes: list[Any] = [value.grad_fn]
        for node in nodes:
            if hasattr(node, 'variable'):
                found |= self.origins[id(node.variable)][1]
            elif node is not None:
                nodes += [before for before, _ in node.next_functions if before not in nodes]
                found |= set() if _keeps_numbers(node) else {CHANGE}
        return found

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **handed: Any
    ) -> tuple[Tensor, None]:
        """Note the arguments of the attention function, and return an empty output ``(B, N, H, d)``."""
        self.host.training = False
        self.calls.append(((query, key, value), handed))
        heads = query.new_empty((query.shape[0], query.shape[2], query.shape[1], value.shape[-1]))
        return self.end(heads, {HEADS}), None

    def result(self) -> Trial:
        """Return what this run tells; a ConfigError is the end of a sentence about the class."""
        if len(self.calls) > 1:
            raise ConfigError(f'calls its attention function {len(self.calls)} times')
        (heads, handed), *_ = self.calls
        unknown = sorted(handed.keys() - HANDED)
        if unknown:
            raise ConfigError(f'hands {_listed(unknown)} to its attention function')
        found = []
        for part, made in zip(('query', 'key', 'value'), heads, strict=True):
            names = sorted(self.origins_of(made) - {CHANGE, HEADS})
            if len(names) != 1:
                by = f'from {_listed(names)} together' if names else 'without a projection'
                raise ConfigError(f'makes its {part} {by}')
            found += names
        if len(set(found)) == 2:
            raise ConfigError(f'projects query, key and value by {_listed(found)}')
        if len(self.outputs) != 1:
            by = f'projects its heads by {_listed(sorted(self.outputs))}'
            raise ConfigError(by if self.outputs else 'does not project its heads')
        for name, made in zip(found, heads, strict=True):
            input_of_heads(self.inputs[name], made, name)
        query, key, value = heads
        if key.shape[1] != query.shape[1] or value.shape[1] != query.shape[1]:
            raise ConfigError(
                f'has {key.shape[1]} heads of keys and {value.shape[1]} of values for {query.shape[1]} of queries'
            )
        if value.shape[-1] != query.shape[-1]:
            raise ConfigError(f'has heads of {query.shape[-1]} channels, and of {value.shape[-1]} for values')
        return Trial(
            query=found[0],
            key=found[1],
            value=found[2],
            output=next(iter(self.outputs)),
            heads=query.shape[1],
            head_dim=query.shape[-1],
            dropout=float(handed.get('dropout', 0.0)),
            changes=CHANGE in self.origins_of(query) | self.origins_of(key),
        )


def attend_in_trial(module: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """Attention function of a trial, under the name :data:`TRIAL`."""
    return module.trial.attend(*args, **kwargs)


def _keeps_numbers(node: Any) -> bool:
    """Return True if a node of autograd moves numbers, or scales all of them by one."""
    kind = node.name().rstrip('0123456789').removesuffix('Backward')
    return kind in MOVES or (kind in ('Mul', 'Div') and node._saved_other.numel() == 1)


def _listed(names: Iterable[str]) -> str:
    return ' and '.join(names)
