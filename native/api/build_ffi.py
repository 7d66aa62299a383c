"""Write the C source of the extension module pykvq._cffi from pykvq.h (cffi API mode).

usage: build_ffi.py HEADER OUT.c
"""

import re
import sys
from pathlib import Path

import cffi

# Python functions that C may call; defined in pykvq/native.py with ffi.def_extern.
CALLBACKS = """
extern "Python" {
    void pykvq_py_log(int32_t level, const char * text, void * user_data);
    bool pykvq_py_progress(float progress, void * user_data);
}
"""


def declarations(header: str) -> str:
    """Return what stands between the cdef marks of the header, without the export macro."""
    match = re.search(r"^// cdef-begin$(.*)^// cdef-end$", header, re.S | re.M)
    if match is None:
        raise SystemExit("build_ffi.py: the header has no cdef-begin and cdef-end marks")
    return match.group(1).replace("PYKVQ_API ", "")


def main(header_path: str, out_path: str) -> None:
    """Read the header, write the C source."""
    header = Path(header_path).read_text(encoding="utf-8")
    ffi = cffi.FFI()
    ffi.cdef(declarations(header) + "#define PYKVQ_ABI_VERSION ...\n" + CALLBACKS)
    ffi.set_source("pykvq._cffi", '#include "pykvq.h"\n')
    ffi.emit_c_code(out_path)


if __name__ == "__main__":
    main(*sys.argv[1:])
