"""The kernel named python3 is the interpreter that starts it.

Jupyter takes a `python3` that somebody once installed for the user (`~/.local/share/jupyter/kernels`) before
that of the environment it runs in: a notebook would then run in another environment, or in one that is gone.
"""

from __future__ import annotations

from ipykernel.kernelspec import RESOURCES, get_kernel_dict
from jupyter_client.kernelspec import NATIVE_KERNEL_NAME, KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from traitlets import default


class OwnKernelSpecs(KernelSpecManager):
    """Jupyter's kernels, of which `python3` starts `sys.executable`."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        """Return the kernel of that name; raises `NoSuchKernel` for one that is not installed."""
        if kernel_name.lower() == NATIVE_KERNEL_NAME:
            return KernelSpec(resource_dir=RESOURCES, **get_kernel_dict())
        return super().get_kernel_spec(kernel_name)


class OwnKernelManager(AsyncKernelManager):
    """What nbclient starts a notebook's kernel with, over `OwnKernelSpecs`."""

    @default("kernel_spec_manager")
    def _own_specs(self) -> KernelSpecManager:
        return OwnKernelSpecs(data_dir=self.data_dir)
