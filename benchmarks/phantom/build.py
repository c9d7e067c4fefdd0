"""Builds the stub libraries: every symbol that this torch takes from a CUDA library, by hand where stubs/ has it, and
returning 0 where not.

    python build.py TORCH_LIB_FOLDER CUDA_INCLUDE_FOLDER[:FOLDER...] OUTPUT_FOLDER
"""

import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

STUBS = Path(__file__).resolve().parent / "stubs"
# Symbols with a version say where they come from; the others are told by their names.
VERSIONED = {"NVSHMEM": "libnvshmem_host.so.3"}
PREFIXES = {
    "nccl": "libnccl.so.2",
    "cusparseLt": "libcusparseLt.so.0",
    "curand": "libcurand.so.10",
    "cuFile": "libcufile.so.0",
    "nvshmem": "libnvshmem_host.so.3",
    "cu": "libcuda.so.1",
}
ALWAYS = [*PREFIXES.values(), "libnvrtc.so.13"]
BY_HAND = {
    "libcudart.so.13": "cudart.cpp",
    "libnccl.so.2": "nccl.cpp",
    "libcublas.so.13": "cublas.cpp",
    "libcublasLt.so.13": "cublaslt.cpp",
}
MAKES_HANDLE = re.compile(
    r"^(cudnnCreate|cusparseCreate|cusolverDnCreate|curandCreateGenerator|cudnnCreate(Tensor|Filter)Descriptor)$"
)
BODIES = {
    "cublasGetVersion_v2": "(void*, int*v){*v=130000; return 0;}",
    "cudnnGetVersion": "(){return 8500;}",
    "cublasLtGetVersion": "(){return 130000;}",
    "cublasGetPointerMode_v2": "(void*, int*v){*v=0; return 0;}",
    "cublasGetMathMode": "(void*, int*v){*v=0; return 0;}",
    "cublasLtMatmulAlgoGetHeuristic": "(void*,void*,void*,void*,void*,void*,void*,int,char*r,int*got)"
    "{for(int i=0;i<96;i++)r[i]=0; *got=1; return 0;}",
    "cudnnGetErrorString": '(int){static char s[]="phantom"; return (long)s;}',
    "cuDevicePrimaryCtxGetState": "(int, unsigned*f, int*a){*f=0;*a=1;return 0;}",
}
PRODUCT = re.compile(r"cublas(\w*gemm|\w*gemv|\w*dot)", re.I)


def names(torch_libraries: Path, *options: str) -> list[str]:
    """Returns the dynamic symbols of torch's libraries that `nm` lists with these options."""
    libraries = sorted(str(path) for path in torch_libraries.glob("*.so"))
    found = subprocess.run(["nm", "-D", *options, *libraries], capture_output=True, text=True, check=True).stdout
    return [line.split()[-1] for line in found.splitlines() if line.strip() and not line.endswith(":")]


def group_by_library(torch_libraries: Path) -> dict[str, dict[str, str]]:
    """Returns library -> symbol -> version, of all that torch takes from elsewhere."""
    defined = {name.split("@")[0] for name in names(torch_libraries, "--defined-only")}
    libraries: dict[str, dict[str, str]] = defaultdict(dict)
    for item in sorted(set(names(torch_libraries, "--undefined-only"))):
        name, _, version = item.partition("@")
        version = version.lstrip("@")
        if name in defined:
            continue
        if re.match(r"lib(cu|nvrtc)\w*\.so", version) or version in VERSIONED:
            libraries[VERSIONED.get(version, version)][name] = version
        elif not version:
            for prefix, library in PREFIXES.items():
                if re.match(prefix + r"[A-Z_]", name):
                    libraries[library][name] = ""
                    break
    for library in ALWAYS:
        libraries.setdefault(library, {})
    return libraries


def body(name: str) -> str:
    """Returns parameters and body of a function that is not written by hand."""
    if MAKES_HANDLE.match(name):
        return "(void**p){static long h[64]; *p=h; return 0;}"
    if name in BODIES:
        return BODIES[name]
    if PRODUCT.match(name):  # of unknown size: timeline.py warns of it
        return f'(){{phantom_log("gemm",0,"{name}",0,0,0,0,0); return 0;}}'
    return "(){return 0;}"


def build(library: str, symbols: dict[str, str], includes: Sequence[str], out: Path) -> None:
    hand = BY_HAND.get(library)
    by_hand = r"^API [\w \*]+?[ \*](\w+)\("
    done = set(re.findall(by_hand, (STUBS / hand).read_text(), re.M)) if hand else set()
    source = out / (library.split(".so")[0] + "_rest.cpp")
    functions = (f"API long {name}{body(name)}\n" for name in sorted(symbols) if name not in done)
    source.write_text('#include "log.h"\n' + "".join(functions))
    command = ["g++", "-O1", "-shared", "-fPIC", "-w", "-std=c++17", f"-I{STUBS}", *(f"-I{each}" for each in includes)]
    command += ["-o", str(out / library), f"-Wl,-soname,{library}", str(source)]
    if hand:
        command.append(str(STUBS / hand))
    if library != "libcudart.so.13":
        command += [f"-L{out}", "-l:libcudart.so.13"]
    versions = sorted({version for version in symbols.values() if version})
    if versions:
        script = out / f"{library}.map"
        nodes = (_version_node(version, symbols, is_first=version == versions[0]) for version in versions)
        script.write_text("".join(nodes))
        command.append(f"-Wl,--version-script={script}")
    subprocess.run(command, check=True)
    print(f"{library}: {len(symbols)} symbols, {len(done & set(symbols))} by hand", flush=True)


def _version_node(version: str, symbols: dict[str, str], is_first: bool) -> str:
    """Returns the part of a linker's script that gives symbols this version. The first takes all others, too."""
    own = "".join(f" {name};" for name in sorted(symbols) if symbols[name] == version)
    return f"{version} {{ global:{own}{' *;' if is_first else ''} }};\n"


def main(torch_libraries: Path, includes: Sequence[str], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    libraries = group_by_library(torch_libraries)
    # The others are linked to the runtime, which logs.
    for library in sorted(libraries, key=lambda each: each != "libcudart.so.13"):
        build(library, libraries[library], includes, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2].split(":"), Path(sys.argv[3]))
