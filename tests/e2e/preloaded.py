"""What ranks of the tests import, imported once: processes that are forked from one with this module need not do it.

An output directory has a copy of chimera_runtime. Where its files are those of the project's own, importing the copy
gives the modules that have been imported here; else the copy is imported.
"""

import gc
import sys
from collections.abc import Sequence
from importlib import import_module, reload
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_loader
from pathlib import Path
from types import ModuleType

from tests.e2e.copies import RUNTIME, is_copy, states

_PACKAGE = "chimera_runtime"
_OF_TORCH = (
    "torch",
    "torch._dynamo",  # as the first optimizer does
    "torch.autograd.profiler",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.checkpoint.state_dict_saver",
    "torch.distributed.run",
    "torch.profiler._cupti_monitor",  # as the first step of an optimizer does
    "torch.utils.data",
)
_AT_IMPORT = (f"{_PACKAGE}.tools", f"{_PACKAGE}.tools.open.stdio")
"""What looks at its process, or changes it, when it is imported."""


def _modules() -> dict[str, ModuleType]:
    """Imports the modules of the runtime, and takes them away again."""
    for name in _STATES:
        import_module(f"{_PACKAGE}/{name}".removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    return {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] == _PACKAGE}


class Preloaded(MetaPathFinder, Loader):
    """Finds the runtime where the path has it, and gives what was preloaded if its files are the same.

    It does so once in a process: a process that imports the runtime again wants one that knows nothing of the first.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """That of the package, if the copy on the path is the same."""
        if fullname != _PACKAGE:
            return None
        sys.meta_path.remove(self)
        found = PathFinder.find_spec(fullname, path)
        if found is None or found.origin is None or not is_copy(Path(found.origin).parent, _STATES):
            return None
        return spec_from_loader(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The package, as it was imported."""
        return _MODULES[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Its modules come with it, and do again what they do to each process."""
        sys.modules |= _MODULES
        for name in _AT_IMPORT:
            reload(_MODULES[name])


gc.disable()  # what is imported stays
_torch, *_ = [import_module(name) for name in _OF_TORCH]
for _device in (_torch.cuda, _torch.mtia, _torch.xpu):
    if not _device.is_available():  # a seed keeps the whole stack as text for when there is one
        _device.manual_seed_all = lambda seed: None
_STATES = states(RUNTIME)
_MODULES = _modules()
_MODULES[f"{_PACKAGE}.tools.command.options"].parser_of_options()  # which takes long, and is made once in a process
sys.meta_path.insert(0, Preloaded())
gc.enable()
gc.freeze()  # a collection would touch all objects, and a process that is forked copy their pages
