# Compiler cache, sanitizers and the flags of our own sources.

find_program(PYKVQ_CCACHE ccache)
if(PYKVQ_CCACHE AND NOT CMAKE_C_COMPILER_LAUNCHER)
    # paths relative to the source, so that another clone hits the same cache
    set(launcher ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${CMAKE_SOURCE_DIR} CCACHE_NOHASHDIR=1 ${PYKVQ_CCACHE})
    set(CMAKE_C_COMPILER_LAUNCHER ${launcher})
    set(CMAKE_CXX_COMPILER_LAUNCHER ${launcher})
endif()

if(NOT MSVC)
    # a failed check inside ggml's C code is thrown as a C++ exception (native/api/pykvq-guard.h)
    add_compile_options($<$<COMPILE_LANGUAGE:C>:-fexceptions>)
endif()

# AddressSanitizer everywhere, UndefinedBehaviorSanitizer in our own sources
if(PYKVQ_SANITIZE)
    add_compile_options(-fsanitize=address -fno-omit-frame-pointer -g1 -O1)
    add_link_options(-fsanitize=address,undefined)
    set(PYKVQ_OWN_OPTIONS -fsanitize=undefined -fno-sanitize-recover=undefined)
endif()

if(APPLE)
    set(PYKVQ_ORIGIN "@loader_path")
else()
    set(PYKVQ_ORIGIN "$ORIGIN")
endif()

if(MSVC)
    list(APPEND PYKVQ_OWN_OPTIONS /W4)
    set(PYKVQ_NO_CONTRACTION /fp:precise)
else()
    set(PYKVQ_NO_CONTRACTION -ffp-contract=off)
    # ggml's headers define static functions that not every file uses
    list(APPEND PYKVQ_OWN_OPTIONS -Wall -Wextra -Wno-unused-function)
endif()

# Adds sources of ours to a target of llama.cpp. Only ours are compiled with warnings: we cannot act on others.
function(pykvq_attach_sources target)
    target_sources(${target} PRIVATE ${ARGN})
    set_source_files_properties(${ARGN} TARGET_DIRECTORY ${target} PROPERTIES COMPILE_OPTIONS "${PYKVQ_OWN_OPTIONS}"
                                                                              SKIP_UNITY_BUILD_INCLUSION ON)
endfunction()
