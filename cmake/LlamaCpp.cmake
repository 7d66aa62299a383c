# Gets llama.cpp (pinned, override or developer tree), builds ggml and libllama from it and attaches our own sources to
# its targets. The pin is llama_cpp_pin.json; fetching, checking and patching are llama_source.py.

set(PYKVQ_LLAMA_SOURCE_TOOL ${CMAKE_CURRENT_LIST_DIR}/llama_source.py)
file(READ ${CMAKE_CURRENT_LIST_DIR}/llama_cpp_pin.json pin)
string(JSON PYKVQ_LLAMA_CPP_PACKAGE GET "${pin}" package)
string(JSON PYKVQ_LLAMA_CPP_VERSION GET "${pin}" version)
string(JSON PYKVQ_GGML_VERSION GET "${pin}" ggml_version)

if(PYKVQ_LLAMA_CPP_PATCHED_DIR)
    set(PYKVQ_LLAMA_CPP_TREE ${PYKVQ_LLAMA_CPP_PATCHED_DIR})
    set(source_command verify --tree ${PYKVQ_LLAMA_CPP_TREE})
else()
    set(PYKVQ_LLAMA_CPP_TREE ${CMAKE_BINARY_DIR}/llama.cpp)
    set(source_command prepare --dest ${PYKVQ_LLAMA_CPP_TREE})
    if(PYKVQ_LLAMA_CPP_DIR)
        list(APPEND source_command --source ${PYKVQ_LLAMA_CPP_DIR})
    endif()
endif()
execute_process(COMMAND ${Python_EXECUTABLE} ${PYKVQ_LLAMA_SOURCE_TOOL} ${source_command} RESULT_VARIABLE result)
if(result)
    message(FATAL_ERROR "llama.cpp could not be prepared, see the line above")
endif()
# a changed pin or patch configures anew
file(GLOB patches CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/ggml_patches/*.patch)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${PYKVQ_LLAMA_SOURCE_TOOL} ${patches}
             ${CMAKE_CURRENT_LIST_DIR}/llama_archive.py
             ${CMAKE_CURRENT_LIST_DIR}/llama_cpp_pin.json ${CMAKE_SOURCE_DIR}/ggml_patches/series)

# the tree has no history: without these llama.cpp would take our commit for its own
set(LLAMA_BUILD_NUMBER 0)
set(LLAMA_BUILD_COMMIT ${PYKVQ_LLAMA_CPP_PACKAGE}-${PYKVQ_LLAMA_CPP_VERSION})
set(GIT_EXE "" CACHE FILEPATH "" FORCE)

set(BUILD_SHARED_LIBS ON)
foreach(off LLAMA_BUILD_COMMON LLAMA_BUILD_TESTS LLAMA_BUILD_TOOLS LLAMA_BUILD_EXAMPLES LLAMA_BUILD_SERVER LLAMA_BUILD_APP
            LLAMA_OPENSSL LLAMA_ALL_WARNINGS GGML_BUILD_TESTS GGML_BUILD_EXAMPLES GGML_CCACHE)
    set(${off} OFF CACHE BOOL "" FORCE)
endforeach()
# OpenMP shares its threads out among all threads of a process that compute: with more of them than cores its barriers
# sleep, and a token takes five times as long. A context has threads of its own (native/api/pykvq-threads.h).
set(GGML_OPENMP OFF CACHE BOOL "" FORCE)
if(PYKVQ_PORTABLE)
    set(GGML_NATIVE OFF CACHE BOOL "" FORCE)
    set(GGML_BACKEND_DL ON CACHE BOOL "" FORCE)
    set(GGML_CPU_ALL_VARIANTS ON CACHE BOOL "" FORCE)
endif()
if(PYKVQ_CUDA AND PYKVQ_HIP)
    message(FATAL_ERROR "PYKVQ_CUDA and PYKVQ_HIP: one build has one of them, as both define the same symbols")
endif()
set(GGML_CUDA ${PYKVQ_CUDA} CACHE BOOL "" FORCE)
set(GGML_HIP ${PYKVQ_HIP} CACHE BOOL "" FORCE)
add_subdirectory(${PYKVQ_LLAMA_CPP_TREE} ${CMAKE_BINARY_DIR}/llama.cpp-build EXCLUDE_FROM_ALL)

# Names of our own and no version suffix: a wheel holds no symbolic links, and a process may load another libllama too.
function(pykvq_rename_library target)
    set_target_properties(${target} PROPERTIES OUTPUT_NAME pykvq-${target} BUILD_RPATH_USE_ORIGIN ON
                                               INSTALL_RPATH ${PYKVQ_ORIGIN})
    set_property(TARGET ${target} PROPERTY PUBLIC_HEADER)
    set_property(TARGET ${target} PROPERTY VERSION)
    set_property(TARGET ${target} PROPERTY SOVERSION)
endfunction()

set(PYKVQ_LIBRARIES ggml-base ggml llama)
set(PYKVQ_CPU_TARGETS ${GGML_AVAILABLE_BACKENDS})
list(FILTER PYKVQ_CPU_TARGETS INCLUDE REGEX "^ggml-cpu")
if(NOT GGML_BACKEND_DL)
    list(APPEND PYKVQ_LIBRARIES ${GGML_AVAILABLE_BACKENDS})
endif()
foreach(library ${PYKVQ_LIBRARIES})
    pykvq_rename_library(${library})
endforeach()
if(GGML_BACKEND_DL)
    # ggml finds these by name
    foreach(backend ${GGML_AVAILABLE_BACKENDS})
        set_target_properties(${backend} PROPERTIES INSTALL_RPATH ${PYKVQ_ORIGIN})
    endforeach()
endif()
