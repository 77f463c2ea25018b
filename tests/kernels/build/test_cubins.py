"""CUDA source, compiled to machine code without a GPU, and its place on disk."""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from kernels.build import cubins as cuda_compile
from kernels.build.cubins import CompileError, Nvcc, Nvrtc, find_nvrtc, load_cubin, why_not
from kernels.cuda.layout import THREADS, Tile
from kernels.cuda.program import PROGRAMS, Parameter, Program, choose_program

H100 = 232448  # a block's greatest shared memory, in bytes
NVCC = shutil.which("nvcc")
FORWARD = Program("forward", Tile(32, 2, 2, relative=False, dropout=False))
# Registers that the compiler may move to memory in kernels of 64 dimensions, in bytes of a thread:
# what is needed between the products. The products themselves, checked by hand, move none.
SPILLS = {
    "forward": 0,
    "backward_queries": 128,
    "backward_keys": 208,
    "backward_distances": 128,
}

needs_nvcc = pytest.mark.skipif(NVCC is None, reason="nvcc is not on PATH")


def source_of(program: Program) -> str:
    pytest.importorskip("tvm")
    from kernels.cuda.source import cuda_source

    return cuda_source(program.name, program.tile)


def largest(name: str, dim: int) -> Program:
    program = choose_program(name, dim, 512, relative=True, dropout=True, shared_limit=H100)
    assert program is not None
    return program


@needs_nvcc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_every_program_compiles_without_a_gpu(arch, tmp_path):
    programs = [largest(name, 64) for name in PROGRAMS]
    (tmp_path / "all.cu").write_text("\n".join(map(source_of, programs)))
    command = [
        "nvcc",
        "-cubin",
        f"-arch={arch}",
        "-w",
        "-Xptxas",
        "-v",
        "-o",
        "all.cubin",
        "all.cu",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "all.cubin").read_bytes().startswith(b"\x7fELF")
    for program in programs:
        said = done.stderr.split(f"'{program.kernel}'")[1].split("Compiling entry")[0]
        spilled = max(int(n) for n in re.findall(r"(\d+) bytes spill", said))
        used = re.search(r"Used (\d+) registers", said)
        assert used is not None
        # So that two blocks of 256 threads share the 65,536 registers of a multiprocessor.
        assert int(used[1]) * THREADS * program.tile.residency <= 65536
        assert program.shared_bytes * program.tile.residency <= 228 * 1024
        assert spilled <= SPILLS[program.name], f"{program.name}: {spilled} bytes"


@pytest.mark.slow
@needs_nvcc
@pytest.mark.parametrize("dim", [16, 32, 48, 96, 128])
def test_other_head_sizes_compile(dim):
    compiler = Nvcc(str(NVCC))
    for name in PROGRAMS:
        assert compiler.compile(source_of(largest(name, dim)), "sm_80")


@needs_nvcc
def test_nvcc_names_itself_and_what_it_cannot_do():
    compiler = Nvcc(str(NVCC))
    assert re.fullmatch(r"nvcc of CUDA \d+\.\d+", compiler.name)
    with pytest.raises(
        CompileError, match=r"nvcc of CUDA [\d.]+ cannot compile for sm_19: .*gpu arch"
    ):
        compiler.compile('extern "C" __global__ void f() {}', "sm_19")


def test_nvrtc_compiles_what_nvcc_does():
    library = find_nvrtc(torch.version.cuda)
    if library is None:
        pytest.skip("this torch brings no NVRTC")
    compiler = Nvrtc(library)
    assert re.fullmatch(r"NVRTC of CUDA \d+\.\d+", compiler.name)
    for name in PROGRAMS:
        assert compiler.compile(source_of(largest(name, 64)), "sm_90").startswith(b"\x7fELF")
    with pytest.raises(
        CompileError, match=r"NVRTC of CUDA [\d.]+ cannot compile for sm_90: .*error"
    ):
        compiler.compile("int f( {", "sm_90")


class Recorder:
    """Stands for a compiler."""

    name = "a compiler"

    def __init__(self) -> None:
        self.archs: list[str] = []

    def compile(self, source: str, arch: str) -> bytes:
        assert "forward_kernel" in source
        self.archs.append(arch)
        return b"\x7fELF code\n with any bytes \x00 of " + arch.encode()


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(cuda_compile, "cache_folder", lambda: tmp_path)
    return tmp_path


@pytest.fixture
def compiler(folder, monkeypatch) -> Recorder:
    pytest.importorskip("tvm")
    recorder = Recorder()
    monkeypatch.setattr(cuda_compile, "find_compiler", lambda: recorder)
    return recorder


def test_is_compiled_once_for_each_architecture(compiler, folder):
    first, again = load_cubin(FORWARD, "sm_80"), load_cubin(FORWARD, "sm_80")
    assert first == again
    assert load_cubin(FORWARD, "sm_90").code.endswith(b"sm_90")
    assert compiler.archs == ["sm_80", "sm_90"]
    assert Parameter("k", "float4", True) in first.parameters
    assert (
        sorted(path.suffix for path in folder.iterdir() if path.suffix != ".lock") == [".cubin"] * 2
    )


def test_is_found_again_without_a_compiler(compiler, monkeypatch):
    kept = load_cubin(FORWARD, "sm_80")
    monkeypatch.setattr(cuda_compile, "find_compiler", lambda: None)
    assert why_not(FORWARD, "sm_80") is None
    assert load_cubin(FORWARD, "sm_80") == kept


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b"", lambda b: b"{}" + b])
def test_what_is_damaged_is_said_and_compiled_again(compiler, folder, caplog, damage):
    whole = load_cubin(FORWARD, "sm_80")
    path = cuda_compile.cubin_path(FORWARD, "sm_80")
    path.write_bytes(damage(path.read_bytes()))
    assert load_cubin(FORWARD, "sm_80") == whole
    assert "damaged" in caplog.text and len(compiler.archs) == 2


def test_a_compiler_that_fails_leaves_nothing(compiler, folder, monkeypatch):
    def refuse(source: str, arch: str) -> bytes:
        raise CompileError(f"no {arch}")

    monkeypatch.setattr(compiler, "compile", refuse)
    with pytest.raises(CompileError, match="no sm_80"):
        load_cubin(FORWARD, "sm_80")
    assert [path.suffix for path in folder.iterdir()] in ([], [".lock"])


def test_names_change_with_program_tile_and_architecture(folder):
    others = [
        (Program("forward", Tile(32, 2, 2, relative=False, dropout=True)), "sm_80"),
        (Program("forward", Tile(32, 4, 2, relative=False, dropout=False)), "sm_80"),
        (Program("backward_keys", FORWARD.tile), "sm_80"),
        (FORWARD, "sm_90"),
    ]
    paths = {
        cuda_compile.cubin_path(program, arch) for program, arch in [(FORWARD, "sm_80"), *others]
    }
    assert len(paths) == 5


def test_says_what_is_missing(folder, monkeypatch):
    pytest.importorskip("tvm")
    monkeypatch.setattr(cuda_compile, "find_compiler", lambda: None)
    reason = why_not(FORWARD, "sm_80")
    assert reason is not None
    assert "sm_80" in reason and "nvcc" in reason and "NVRTC" in reason and "\n" not in reason
    with pytest.raises(CompileError, match="no CUDA compiler for sm_80"):
        load_cubin(FORWARD, "sm_80")


def test_without_tvm_nothing_is_compiled(folder, monkeypatch):
    monkeypatch.setattr(cuda_compile.importlib.util, "find_spec", lambda name: None)
    assert why_not(FORWARD, "sm_80") == "TVM is not installed (pip install apache-tvm)"


def test_the_compiler_is_nvrtc_or_else_nvcc(monkeypatch, tmp_path):
    find = cuda_compile.find_compiler.__wrapped__
    monkeypatch.setattr(cuda_compile, "find_nvrtc", lambda cuda: ctypes.CDLL(None))
    assert isinstance(find(), Nvrtc)
    monkeypatch.setattr(cuda_compile, "find_nvrtc", lambda cuda: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert find() is None
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch(mode=0o755)
    assert find() == Nvcc(str(tmp_path / "bin" / "nvcc"))


def test_nvrtc_is_not_looked_for_without_cuda():
    assert find_nvrtc(None) is None
