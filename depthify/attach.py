"""Where in a model depthify attaches: to the smallest module whose forward runs all decoder blocks.

Found by structure, not by name. Attaching low keeps loss functions and generation helpers out of the
capture, and covers callers that call the inner model directly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from . import huggingface
from .errors import OptionError
from .loops import runs_in_loop


def block_lists(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Outermost containers of repeated blocks: module lists, and sequences or dictionaries of one class."""
    found: list[tuple[str, nn.Module]] = []
    for path, module in model.named_modules():
        if any(path == outer or path.startswith(f"{outer}.") for outer, _ in found):
            continue
        if path and _repeats(module):
            found.append((path, module))
    return found


def _repeats(module: nn.Module) -> bool:
    children = list(module.children())
    if len(children) < 2 or not any(True for child in children for _ in child.parameters()):
        return False
    if isinstance(module, nn.ModuleList):
        return any(True for child in children for _ in child.children())
    if isinstance(module, (nn.Sequential, nn.ModuleDict)):
        deep = all(any(True for _ in child.children()) for child in children)
        return deep and len({type(child) for child in children}) == 1
    return False


def _runs(module: nn.Module) -> bool:
    """Whether a module has a forward of its own."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return False
    return type(module).forward is not nn.Module.forward


def _ancestors(path: str) -> Iterator[str]:
    while path:
        path = path.rpartition(".")[0]
        yield path


def find_owner(
    model: nn.Module, blocks: Sequence[nn.Module] | None = None, where: str | None = None
) -> tuple[str, nn.Module, list[nn.Module]]:
    """The module to attach to, its path, and its blocks (empty where several lists make that unclear).

    Args:
        blocks: the decoder blocks, where the caller names them.
        where: path of the stack, where the model has several; None: the one its config records, if any.

    Raises:
        OptionError: a named block or path is no part of the model, or no module around them has a forward.
    """
    if blocks is not None and where is not None:
        raise OptionError(f"where={where!r} and blocks=[...]: either names the stack; give one of them")
    if blocks is not None:
        return _owner_of(model, blocks)
    where = huggingface.recorded_where(model) if where is None else where
    lists = block_lists(model) if where is None else _lists_at(model, where)
    if where is not None and len(lists) > 1:
        return where, model.get_submodule(where), []
    if len(lists) > 1:
        decoder = _decoder_of(model)
        if decoder is not None:
            lists = [(path, module) for path, module in lists if path.startswith(decoder)]
    if len(lists) != 1:
        return "", model, []
    path, blocks = lists[0]
    for ancestor in _ancestors(path):
        owner = model.get_submodule(ancestor)
        if _runs(owner):
            ancestor = _around_loops(model, huggingface.recording_owner(model, ancestor))
            return ancestor, model.get_submodule(ancestor), list(blocks.children())
    raise OptionError(f"model: no module around {path!r} of {type(model).__name__} has a forward")


def _lists_at(model: nn.Module, where: str) -> list[tuple[str, nn.Module]]:
    """The containers of blocks at or below the path ``where``; several only in a module with a forward."""
    try:
        module = model.get_submodule(where) if isinstance(where, str) else None
    except AttributeError:
        module = None
    if module is not None and _repeats(module):
        return [(where, module)]
    found = [(f"{where}.{path}", inner) for path, inner in block_lists(module)] if module is not None else []
    if found and (len(found) == 1 or _runs(module)):
        return found if where else block_lists(model)
    wrong = "no such module" if module is None else f"{len(found)} lists of decoder blocks in it"
    known = ", ".join(repr(path) for path, _ in found or block_lists(model)) or "none"
    raise OptionError(
        f"where={where!r}: {wrong}. where must be the path of a module of {type(model).__name__} that holds "
        f"one stack of decoder blocks, or of the list of blocks itself; lists of blocks are: {known}"
    )


def holds_others(owner: nn.Module, blocks: Sequence[nn.Module]) -> bool:
    """Whether ``owner`` repeats blocks besides ``blocks``; False if none are named."""
    named = set(blocks)
    ours = {part for block in blocks for part in block.modules()}
    return bool(named) and any(
        member not in ours and named.isdisjoint(member.modules())
        for _, container in block_lists(owner)
        for member in container.children()
    )


def _around_loops(model: nn.Module, path: str) -> str:
    """The path of the outermost module whose forward runs the one at ``path`` in a loop; else ``path``."""
    found = path
    for ancestor in _ancestors(path):
        inside = path[len(ancestor) + 1 if ancestor else 0 :].partition(".")[0]
        if runs_in_loop(model.get_submodule(ancestor), inside):
            found = ancestor
    return found


def _decoder_of(model: nn.Module) -> str | None:
    """Path prefix of the text decoder, where the model says which of its parts that is (transformers'
    public API)."""
    getter = getattr(model, "get_decoder", None)
    if not callable(getter):
        return None
    try:
        decoder = getter()
    except (AttributeError, NotImplementedError):
        return None
    for path, module in model.named_modules():
        if module is decoder and path:
            return f"{path}."
    return None


def _owner_of(model: nn.Module, blocks: Sequence[nn.Module]) -> tuple[str, nn.Module, list[nn.Module]]:
    """The smallest module with a forward around all of ``blocks``."""
    paths = {module: path for path, module in model.named_modules()}
    named = list(blocks) if isinstance(blocks, (list, tuple, nn.ModuleList)) else []
    missing = [
        type(block).__name__ for block in named if not isinstance(block, nn.Module) or block not in paths
    ]
    if len(named) < 2 or missing:
        raise OptionError(
            f"blocks={[type(b).__name__ for b in named]}: blocks must be a list of at least two modules of "
            "the model" + (f"; not in it: {missing}" if missing else "")
        )
    common = paths[named[0]]
    while not all(paths[block].startswith(f"{common}." if common else "") for block in named) or not _runs(
        model.get_submodule(common)
    ):
        if not common:
            raise OptionError(
                f"model: no module of {type(model).__name__} around the given blocks has a forward"
            )
        common = common.rpartition(".")[0]
    return common, model.get_submodule(common), named
