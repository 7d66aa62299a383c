// The C API's own promises that need no model: arguments are checked, errors speak, nothing ends the process.

#include "check.h"
#include "pykvq.h"

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>

namespace fs = std::filesystem;

static void check_load_fails(const fs::path & path, pykvq_status expected, const char * text) {
    pykvq_model_params params = pykvq_model_default_params();
    pykvq_model * model       = nullptr;
    const pykvq_status status = pykvq_model_load(path.string().c_str(), &params, &model);
    CHECK(status == expected, "%s gave status %d: %s", path.string().c_str(), (int) status, pykvq_last_error());
    CHECK(model == nullptr, "%s", path.string().c_str());
    CHECK(std::strstr(pykvq_last_error(), text), "'%s' does not say '%s'", pykvq_last_error(), text);
    CHECK(!std::strchr(pykvq_last_error(), '\n'), "more than a line: %s", pykvq_last_error());
}

static void write(const fs::path & path, const std::string & bytes) {
    std::ofstream(path, std::ios::binary) << bytes;
}

static void test_bad_files() {
    const fs::path folder = fs::temp_directory_path() / ("pykvq-test-api-" + std::to_string(check_rng()()));
    fs::create_directories(folder);
    check_load_fails(folder / "missing.gguf", PYKVQ_STATUS_IO, "not found");
    check_load_fails(folder, PYKVQ_STATUS_IO, "directory");
    write(folder / "empty.gguf", "");
    check_load_fails(folder / "empty.gguf", PYKVQ_STATUS_FORMAT, "0 bytes");
    write(folder / "text.gguf", "This is a text file and no model.\n");
    check_load_fails(folder / "text.gguf", PYKVQ_STATUS_FORMAT, "GGUF");
    write(folder / "header.gguf", "GGUF");
    check_load_fails(folder / "header.gguf", PYKVQ_STATUS_FORMAT, "cannot load");
    write(folder / "version.gguf", std::string("GGUF\xff\xff\xff\x7f", 8) + std::string(64, '\xff'));
    check_load_fails(folder / "version.gguf", PYKVQ_STATUS_FORMAT, "cannot load");
    write(folder / "counts.gguf", std::string("GGUF\x03\0\0\0", 8) + std::string(16, '\x7f'));
    check_load_fails(folder / "counts.gguf", PYKVQ_STATUS_FORMAT, "cannot load");
    fs::remove_all(folder);
}

static void test_kv_types() {
    CHECK(pykvq_kv_type_count() >= 6, "%d", pykvq_kv_type_count());
    for (int32_t i = 0; i < pykvq_kv_type_count(); i++) {
        const char * name = pykvq_kv_type_name(i);
        const int32_t n   = pykvq_kv_type_block_size(name) * 3;
        CHECK(n > 0 && pykvq_kv_type_block_bytes(name) > 0, "%s", name);
        const std::vector<float> x = random_normal((size_t) n);
        std::vector<float> y((size_t) n);
        std::vector<uint8_t> data((size_t) (3 * pykvq_kv_type_block_bytes(name)));
        CHECK(pykvq_kv_type_encode(name, x.data(), n, data.data()) == PYKVQ_STATUS_OK, "%s", pykvq_last_error());
        CHECK(pykvq_kv_type_decode(name, data.data(), n, y.data()) == PYKVQ_STATUS_OK, "%s", pykvq_last_error());
        CHECK(nmse(y, x) < 0.15, "%s: %g", name, nmse(y, x));
    }
    CHECK(pykvq_kv_type_name(-1) == nullptr && pykvq_kv_type_name(1000) == nullptr, "out of range");
    CHECK(pykvq_kv_type_block_size("q5_k") == 0, "q5_k is no KV type");
    float value = 0.0f;
    CHECK(pykvq_kv_type_encode("ultra5", &value, 64, &value) == PYKVQ_STATUS_INVALID_ARGUMENT, "unknown type");
    CHECK(std::strstr(pykvq_last_error(), "q4_ve"), "'%s' lists no types", pykvq_last_error());
    CHECK(pykvq_kv_type_encode("q4_ve", &value, 63, &value) == PYKVQ_STATUS_INVALID_ARGUMENT, "half a block");
}

static void test_null_arguments() {
    pykvq_model_params params = pykvq_model_default_params();
    pykvq_model * model       = nullptr;
    CHECK(pykvq_model_load(nullptr, &params, &model) == PYKVQ_STATUS_INVALID_ARGUMENT, "%s", pykvq_last_error());
    CHECK(pykvq_model_load("x", nullptr, &model) == PYKVQ_STATUS_INVALID_ARGUMENT, "%s", pykvq_last_error());
    CHECK(pykvq_model_load("x", &params, nullptr) == PYKVQ_STATUS_INVALID_ARGUMENT, "%s", pykvq_last_error());
    pykvq_context_params context_params = pykvq_context_default_params();
    pykvq_context * context             = nullptr;
    CHECK(pykvq_context_create(nullptr, &context_params, &context) == PYKVQ_STATUS_INVALID_ARGUMENT, "%s",
          pykvq_last_error());
    CHECK(pykvq_state_load(nullptr, -1, (const uint8_t *) "", 0) == PYKVQ_STATUS_INVALID_ARGUMENT, "%s",
          pykvq_last_error());
    pykvq_model_free(nullptr);
    pykvq_context_free(nullptr);
    pykvq_sampler_free(nullptr);
}

static void test_library() {
    CHECK(pykvq_abi_version() == PYKVQ_ABI_VERSION, "%d", pykvq_abi_version());
    CHECK(std::strstr(pykvq_build_info(), "\"cpu_features\": {\""), "%s", pykvq_build_info());
}

int main() {
    test_library();
    test_kv_types();
    test_null_arguments();
    test_bad_files();
    return check_result("test-api");
}
