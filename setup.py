# SPDX-License-Identifier: Apache-2.0
"""Builds every rmq/_core/*.pyx.

RMQ_DEBUG=1     bounds checks, asserts and line tracing in the compiled modules
RMQ_SANITIZE=1  AddressSanitizer and UndefinedBehaviorSanitizer (CONTRIBUTING.md says how to run them)
RMQ_VALGRIND=1  symbols, and code that Valgrind's reports can be read by
RMQ_PLAIN=1     the C code of machines without SSE
"""

import os
import platform
import sys
from pathlib import Path

import numpy
from Cython.Build import cythonize
from setuptools import Extension, setup

DEBUG = os.environ.get("RMQ_DEBUG") == "1"
SANITIZE = os.environ.get("RMQ_SANITIZE") == "1"
VALGRIND = os.environ.get("RMQ_VALGRIND") == "1"
PLAIN = os.environ.get("RMQ_PLAIN") == "1"

optimise = "-O1" if DEBUG or SANITIZE or VALGRIND else "-O3"
# -g0 because Python's own CFLAGS say -g: symbols for gdb make a wheel five times as large.
compile_args = ["-std=c11", optimise, "-g0", "-fno-strict-aliasing", "-Wno-unused-function"]
# -s because names of static functions are a tenth of the wheel; `make debug` keeps them. noseparate-code because pages
# that hold code alone are a sixteenth of each module, as padding.
link_args = ["-Wl,-s,-z,noseparate-code"] if sys.platform == "linux" and not (DEBUG or SANITIZE or VALGRIND) else []
macros: list[tuple[str, str | None]] = [("NPY_NO_DEPRECATED_API", "NPY_2_0_API_VERSION")]
if PLAIN:
    compile_args.append("-U__SSE2__")
elif platform.machine() in ("x86_64", "AMD64"):
    # The wheels of numpy 2.4 and pyarrow ask as much. No wheel tag says it, and auditwheel does not see it.
    compile_args.append("-march=x86-64-v2")
if DEBUG:
    compile_args += ["-g", "-UNDEBUG"]
    macros.append(("CYTHON_TRACE_NOGIL", "1"))
if VALGRIND:
    compile_args.append("-g")
if SANITIZE:
    flags = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
    compile_args += [*flags, "-g1", "-fno-omit-frame-pointer"]
    link_args += flags

sources = sorted(Path("rmq/_core").glob("*.pyx"))
SHARED = "rmq._core._cyutility"  # what Cython brings along for memoryviews, once for all modules
modules = [(f"rmq._core.{source.stem}", source) for source in sources] + [(SHARED, Path("rmq/_core/_cyutility.c"))]
extensions = [
    Extension(
        name,
        [source.as_posix()],
        include_dirs=["rmq/_core", numpy.get_include()],
        depends=[header.as_posix() for header in sorted(Path("rmq/_core").glob("*.h"))],
        define_macros=macros,
        extra_compile_args=compile_args,
        extra_link_args=link_args,
    )
    for name, source in modules
]
if len(extensions) == 1:
    raise SystemExit("setup.py: no rmq/_core/*.pyx here; without its compiled modules rmq would install and not work")

setup(
    options={"build_ext": {"parallel": True}},
    ext_modules=cythonize(
        extensions,
        build_dir="build/cython",
        shared_utility_qualified_name=SHARED,
        compiler_directives={
            "language_level": 3,
            "boundscheck": DEBUG,
            "wraparound": False,
            "initializedcheck": DEBUG,
            "cdivision": True,
            "auto_pickle": False,
            # A method of C, without the attributes of a Python function, is called in two thirds of the time;
            # its signature stands in its docstring, in the form that inspect.signature reads.
            "binding": False,
            "embedsignature": True,
            "embedsignature.format": "clinic",
            "linetrace": DEBUG,
            "freethreading_compatible": False,
        },
    )
)
