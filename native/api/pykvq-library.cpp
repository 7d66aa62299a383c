#include "pykvq-guard.h"

#include "ggml-backend.h"

#include <cstring>

namespace {

// The types a KV cache may have: what ggml can write a row of and read back.
const ggml_type KV_TYPES[] = {
    GGML_TYPE_F32,  GGML_TYPE_F16,    GGML_TYPE_BF16,  GGML_TYPE_Q8_0,   GGML_TYPE_Q5_1,
    GGML_TYPE_Q5_0, GGML_TYPE_Q4_1,   GGML_TYPE_Q4_0,  GGML_TYPE_IQ4_NL, GGML_TYPE_Q4_VE,
    GGML_TYPE_Q2_T, GGML_TYPE_Q4_VES, GGML_TYPE_Q2_TS,
};
constexpr int32_t N_KV_TYPES = sizeof(KV_TYPES) / sizeof(KV_TYPES[0]);

bool find_kv_type(const char * name, ggml_type & type) {
    for (const ggml_type candidate : KV_TYPES) {
        if (name && std::strcmp(ggml_type_name(candidate), name) == 0) {
            type = candidate;
            return true;
        }
    }
    return false;
}

std::string kv_type_list() {
    std::string list;
    for (const ggml_type type : KV_TYPES) {
        list += (list.empty() ? "" : ", ") + std::string(ggml_type_name(type));
    }
    return list;
}

void require_whole_blocks(ggml_type type, int64_t n) {
    if (n < 0 || n % ggml_blck_size(type) != 0) {
        pykvq_throw(PYKVQ_STATUS_INVALID_ARGUMENT, "%s holds blocks of %lld values: %lld is not a multiple",
                    ggml_type_name(type), (long long) ggml_blck_size(type), (long long) n);
    }
}

std::string cpu_features() {
    auto * reg = ggml_backend_reg_by_name("CPU");
    auto get_features =
        reg ? (ggml_backend_get_features_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_get_features") :
              nullptr;
    std::string json;
    for (auto * feature = get_features ? get_features(reg) : nullptr; feature && feature->name; feature++) {
        json += (json.empty() ? "\"" : ", \"") + std::string(feature->name) + "\": \"" + feature->value + "\"";
    }
    return "{" + json + "}";
}

}  // namespace

ggml_type pykvq_kv_type(const char * name, const char * argument) {
    ggml_type type;
    if (!find_kv_type(name, type)) {
        pykvq_throw(PYKVQ_STATUS_INVALID_ARGUMENT, "%s: unknown KV type '%s'; valid: %s", argument,
                    name ? name : "(null)", kv_type_list().c_str());
    }
    return type;
}

int32_t pykvq_abi_version(void) {
    return PYKVQ_ABI_VERSION;
}

const char * pykvq_build_info(void) {
    static std::string info;
    const pykvq_status status = pykvq_guard([] {
        static const std::string json = pykvq_format(
            "{\"llama_cpp\": \"%s\", \"ggml\": \"%s\", \"compiler\": \"%s\", \"build\": \"%s\", \"cpu_features\": %s}",
            PYKVQ_LLAMA_CPP_VERSION, PYKVQ_GGML_VERSION, PYKVQ_COMPILER,
#ifdef PYKVQ_BACKEND_DL
            "portable",
#else
            "native",
#endif
            cpu_features().c_str());
        info = json;
    });
    return status == PYKVQ_STATUS_OK ? info.c_str() : "{}";
}

int32_t pykvq_kv_type_count(void) {
    return N_KV_TYPES;
}

const char * pykvq_kv_type_name(int32_t index) {
    return index >= 0 && index < N_KV_TYPES ? ggml_type_name(KV_TYPES[index]) : nullptr;
}

int32_t pykvq_kv_type_block_size(const char * name) {
    ggml_type type;
    return find_kv_type(name, type) ? (int32_t) ggml_blck_size(type) : 0;
}

int32_t pykvq_kv_type_block_bytes(const char * name) {
    ggml_type type;
    return find_kv_type(name, type) ? (int32_t) ggml_type_size(type) : 0;
}

// types that were removed from ggml keep their number but have no blocks
static bool is_tensor_type(int32_t type) {
    return type >= 0 && type < GGML_TYPE_COUNT && ggml_blck_size((ggml_type) type) > 0;
}

const char * pykvq_tensor_type_name(int32_t type) {
    return is_tensor_type(type) ? ggml_type_name((ggml_type) type) : nullptr;
}

int32_t pykvq_tensor_type_block_size(int32_t type) {
    return is_tensor_type(type) ? (int32_t) ggml_blck_size((ggml_type) type) : 0;
}

int32_t pykvq_tensor_type_block_bytes(int32_t type) {
    return is_tensor_type(type) ? (int32_t) ggml_type_size((ggml_type) type) : 0;
}

pykvq_status pykvq_kv_type_encode(const char * name, const float * x, int64_t n, void * data) {
    return pykvq_guard([&] {
        const ggml_type type = pykvq_kv_type(name, "name");
        require_whole_blocks(type, n);
        pykvq_require(x, "x");
        pykvq_require(data, "data");
        if (type == GGML_TYPE_F32) {
            std::memcpy(data, x, (size_t) n * sizeof(float));
        } else {
            ggml_get_type_traits(type)->from_float_ref(x, data, n);
        }
    });
}

pykvq_status pykvq_kv_type_decode(const char * name, const void * data, int64_t n, float * y) {
    return pykvq_guard([&] {
        const ggml_type type = pykvq_kv_type(name, "name");
        require_whole_blocks(type, n);
        pykvq_require(data, "data");
        pykvq_require(y, "y");
        if (type == GGML_TYPE_F32) {
            std::memcpy(y, data, (size_t) n * sizeof(float));
        } else {
            ggml_get_type_traits(type)->to_float(data, y, n);
        }
    });
}
