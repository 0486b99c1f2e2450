"""Where a program is compiled: CPU devices here, or a TPU or GPU cluster that doesn't have to be there.

A target is written `platform[:chip][:topology]`:

    cpu             every CPU device that JAX has
    cpu:8           8 simulated ones
    tpu:v5e:4x4     16 chips; chips per torus dimension
    tpu:v5p:8x8x8   512 chips
    gpu:h100:2x8    2 hosts x 8 GPUs

TPU and GPU compilers come as plugins and need no device.
"""

from __future__ import annotations

import functools
import glob
import importlib
import importlib.util
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, TypeAlias

import jax
from jax.experimental import topologies

from spmd_auto.errors import MeshError, VerifyError
from spmd_auto.mesh.simulate import simulate_devices

Device: TypeAlias = Any  # jax.Device: a C++ class that type checkers can't see

_EXAMPLES = ("cpu:8", "tpu:v5e:4x4", "tpu:v5p:8x8x8", "gpu:h100:2x8")
# Torus dimensions of the TPU generations that libtpu compiles for with one device a chip.
_TPU_TORUS = {"v4": 3, "v5e": 2, "v5p": 3, "v6e": 2}
# Chips of a host, which libtpu wants the topology to be a multiple of.
_TPU_HOST = (2, 2, 1)
# Without a device to try tiles on, Triton's guess for a contraction may fit none; cuBLAS then computes it. What is
# moved between devices is the same.
_TRITON, _NO_TILES = "xla_gpu_enable_triton_gemm", "Couldn't find output tile sizes"
# libtpu asks the cloud's metadata server who it is, and locks the machine's TPUs, unless told otherwise.
_TPU_ENVIRONMENT = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
_GPU_ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "3"}


@dataclass(frozen=True, slots=True)
class Target:
    """A place to compile for; made by `parse_target`.

    Attributes:
      platform: "cpu", "tpu" or "gpu".
      chip: "v5e", "h100", ...; "" for the CPU.
      shape: chips per torus dimension (TPU), hosts and GPUs a host (GPU), or the number of devices (CPU); () for all
        CPU devices there are.
    """

    platform: str
    chip: str = ""
    shape: tuple[int, ...] = ()

    def __str__(self) -> str:
        size = "x".join(map(str, self.shape))
        return ":".join(part for part in (self.platform, self.chip, size) if part)

    @property
    def device_count(self) -> int:
        """Devices of the target. Starts JAX for a CPU target without a number."""
        return math.prod(self.shape) if self.shape else len(jax.devices("cpu"))

    @property
    def compiler_options(self) -> dict[str, Any]:
        """Options for `lowered.compile(compiler_options=...)`. GPU: no autotuning, which would need the device."""
        return {"xla_gpu_autotune_level": 0} if self.platform == "gpu" else {}

    @property
    def requirement(self) -> str:
        """The extra that brings the compiler, "" where JAX itself does."""
        return {"tpu": "spmd-auto[tpu]", "gpu": "spmd-auto[gpu]"}.get(self.platform, "")

    def is_installed(self) -> bool:
        """Whether the compiler of this platform is installed."""
        if self.platform == "tpu":
            return importlib.util.find_spec("libtpu") is not None
        if self.platform == "gpu":
            return any(importlib.util.find_spec(f"jax_cuda{n}_plugin") is not None for n in (12, 13))
        return True

    def devices(self, count: int | None = None) -> list[Device]:
        """The devices to make a mesh of, in the topology's own order.

        Args:
          count: only the first so many. None: all.

        Raises:
          VerifyError: the compiler isn't installed, the topology isn't possible, has fewer than `count` devices, or is
            of TPUs and has more: their compiler makes programs of the whole slice, and ends the process for others.
        """
        self._require_installed()
        devices = {"cpu": self._cpu_devices, "tpu": self._tpu_devices, "gpu": self._gpu_devices}[self.platform](count)
        if count is None:
            return devices
        if count > len(devices):
            raise VerifyError(
                f"{self} has {len(devices)} devices, {count} were asked for",
                "the mesh is larger than the target",
                ["name a larger target", "or use a smaller mesh"],
            )
        if self.platform == "tpu" and count < len(devices):
            raise VerifyError(
                f"{self} has {len(devices)} devices, the mesh {count}",
                "a TPU program is compiled for a whole slice",
                [f"name a slice of {count} chips", f"or plan for {len(devices)}"],
            )
        return devices[:count]

    def _require_installed(self) -> None:
        if self.is_installed():
            return
        package, extra = {
            "tpu": ("libtpu", "libtpu.so is the whole TPU compiler; no TPU is needed"),
            "gpu": ("the CUDA plugin of JAX", "its compiler needs neither a GPU nor the other nvidia packages"),
        }[self.platform]
        fixes = [f"pip install '{self.requirement}'"]
        if self.platform == "gpu":
            fixes.append(
                f"or only what compiling needs: pip install --no-deps jax-cuda12-plugin=={jax.__version__} "
                f"jax-cuda12-pjrt=={jax.__version__}"
            )
        raise VerifyError(f"can't compile for {self}: {package} is not installed", extra, fixes)

    def _cpu_devices(self, count: int | None) -> list[Device]:
        wanted = math.prod(self.shape) if self.shape else count
        if wanted is not None:
            try:
                simulate_devices(wanted)
            except MeshError as error:
                raise VerifyError(f"can't compile for {self}: {error.what}", error.why, error.fixes) from error
        devices = jax.devices("cpu")
        return devices[:wanted] if self.shape else devices

    def _tpu_devices(self, count: int | None) -> list[Device]:
        if not glob.glob("/dev/accel*"):  # where there are TPUs, libtpu has to find out about them
            _set_environment(_TPU_ENVIRONMENT)
        # A topology smaller than a host is one smaller host.
        host = tuple(min(a, b) for a, b in zip((*self.shape, 1)[:3], _TPU_HOST, strict=True))
        options: dict[str, Any] = {"chips_per_host_bounds": host}
        if self.chip == "v4":
            options["chip_config_name"] = "megacore"  # both cores of a chip as one device, as JAX uses them
        name = f"{self.chip}:{'x'.join(map(str, self.shape))}"
        return self._topology(platform="tpu", topology_name=name, **options)

    def _gpu_devices(self, count: int | None) -> list[Device]:
        _set_environment(_GPU_ENVIRONMENT)
        _register_cuda_compiler()
        config = (resources.files("spmd_auto.verify") / "gpu_targets" / f"{self.chip}.pbtxt").read_text()
        hosts, per_host = self.shape
        # The plugin's form is <partitions>x<hosts of a partition>x<devices of a host>.
        return self._topology(platform="cuda", topology_name="", topology=f"1x{hosts}x{per_host}", target_config=config)

    def _topology(self, **arguments: Any) -> list[Device]:
        try:
            return list(_topology_devices(**arguments))
        except (RuntimeError, ValueError, NotImplementedError) as error:
            raise VerifyError(
                f"the compiler for {self} doesn't accept this topology",
                str(error).splitlines()[0],
                [f"topologies look like {', '.join(_EXAMPLES[1:])}", f"or pip install -U '{self.requirement}'"],
            ) from error


def parse_target(text: str | Target) -> Target:
    """Reads a target such as `"tpu:v5e:4x4"`; a `Target` is returned as it is.

    Raises:
      VerifyError: unknown platform or chip, or a topology that the chip can't have.
    """
    if isinstance(text, Target):
        return text
    if not isinstance(text, str):
        raise _unknown(repr(text), f"it is a {type(text).__name__}, not a text")
    platform, *rest = text.strip().lower().split(":")
    if platform == "cuda":
        platform = "gpu"
    if platform == "cpu" and len(rest) <= 1:
        return Target("cpu", "", _shape(text, rest[0], 1) if rest else ())
    if platform not in ("tpu", "gpu"):
        raise _unknown(text, f"its platform {platform!r} is none of cpu, tpu, gpu")
    if len(rest) != 2:
        raise _unknown(text, f"a {platform} target has a chip and a topology")
    chip, size = rest
    chips = tuple(_TPU_TORUS) if platform == "tpu" else gpu_chips()
    if chip not in chips:
        raise _unknown(text, f"its chip {chip!r} is none of {', '.join(chips)}")
    shape = _shape(text, size, _TPU_TORUS[chip] if platform == "tpu" else 2)
    if platform == "tpu":
        for sides, host in zip(shape, _TPU_HOST, strict=False):
            if sides > host and sides % host:
                raise _unknown(text, f"a side of {sides} is no multiple of a host's {host}")
    return Target(platform, chip, shape)


def gpu_chips() -> tuple[str, ...]:
    """GPUs that can be compiled for without one: those with a description in `gpu_targets/`."""
    folder = resources.files("spmd_auto.verify") / "gpu_targets"
    return tuple(sorted(f.name.removesuffix(".pbtxt") for f in folder.iterdir() if f.name.endswith(".pbtxt")))


def compile_for(target: str | Target, lowered: Any, options: Mapping[str, Any] | None = None) -> Any:
    """Compiles what `jax.jit(f).lower(...)` returned, with the options that the target needs.

    Args:
      target: the target whose devices the program's mesh was made of.
      options: further compiler options; they win over the target's. libtpu (0.0.42 and 0.0.50) aborts the process where
        an asynchronous collective would have to pass through a `while` whose state is a single array;
        `{"xla_tpu_enable_async_collective_fusion_multiple_steps": False}` avoids it and moves the same bytes.

    Returns:
      The compiled program, as `lowered.compile()` gives it.
    """
    where = parse_target(target)
    merged = {**where.compiler_options, **(options or {})}
    try:
        return lowered.compile(compiler_options=merged or None)
    except jax.errors.JaxRuntimeError as error:
        if where.platform != "gpu" or _TRITON in merged or _NO_TILES not in str(error):
            raise
        return lowered.compile(compiler_options={**merged, _TRITON: False})


def _shape(text: str, size: str, dimensions: int) -> tuple[int, ...]:
    parts = size.split("x")
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise _unknown(text, f"{size!r} is no size (numbers joined by x)")
    if len(parts) != dimensions:
        raise _unknown(text, f"{size!r} has {len(parts)} dimension(s), here it takes {dimensions}")
    return tuple(int(part) for part in parts)


def _unknown(text: str, why: str) -> VerifyError:
    return VerifyError(f"unknown compilation target {text!r}", why, [f"for example {e!r}" for e in _EXAMPLES])


@functools.cache  # the same device objects each time: JAX tells devices of two topologies apart
def _topology_devices(*, chips_per_host_bounds: tuple[int, ...] | None = None, **arguments: str) -> tuple[Device, ...]:
    bounds: dict[str, Any] = (
        {} if chips_per_host_bounds is None else {"chips_per_host_bounds": list(chips_per_host_bounds)}
    )
    return tuple(topologies.get_topology_desc(**arguments, **bounds).devices)


def _register_cuda_compiler() -> None:
    """Registers JAX's CUDA plugin although this machine may have no CUDA: only its compiler is wanted.

    The plugin refuses to register where it finds no CUDA, unless it is told not to look or JAX runs on the CPU only.
    JAX asks it once, so a refusal before now has to be made up for.
    """
    asked = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
    before = os.environ.get(asked)
    os.environ[asked] = "1"
    try:
        topologies.get_topology_desc(platform="cuda", topology_name="", topology="1x1x1", target_config="")
    except NotImplementedError:
        for name in ("xla_cuda12", "xla_cuda13"):
            if importlib.util.find_spec(f"jax_plugins.{name}") is not None:
                importlib.import_module(f"jax_plugins.{name}").initialize()
    except (RuntimeError, ValueError):
        pass  # it is registered; this description is empty
    finally:
        os.environ.pop(asked) if before is None else os.environ.update({asked: before})


def _set_environment(values: Mapping[str, str]) -> None:
    for key, value in values.items():
        os.environ.setdefault(key, value)
