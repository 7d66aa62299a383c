#include "pykvq-system.h"

#include <algorithm>
#include <fstream>
#include <set>
#include <string>
#include <thread>

#ifdef _WIN32
#    define WIN32_LEAN_AND_MEAN
#    include <windows.h>
#elif defined(__APPLE__)
#    include <sys/sysctl.h>
#else
#    include <sched.h>
#endif

#ifdef __linux__

// A number from a file of control group v2; "max" and a missing file are -1.
static int64_t read_number(const std::string & path) {
    std::ifstream file(path);
    int64_t value;
    return file >> value ? value : -1;
}

static int64_t cgroup_available() {
    std::ifstream self("/proc/self/cgroup");
    std::string line;
    while (std::getline(self, line)) {
        if (line.rfind("0::", 0) == 0) {
            const std::string folder = "/sys/fs/cgroup" + line.substr(3);
            const int64_t limit      = read_number(folder + "/memory.max");
            const int64_t used       = read_number(folder + "/memory.current");
            return limit >= 0 && used >= 0 ? std::max<int64_t>(limit - used, 1) : -1;
        }
    }
    return -1;
}

int64_t pykvq_system_available_memory() {
    std::ifstream meminfo("/proc/meminfo");
    std::string key;
    int64_t kib;
    std::string unit;
    int64_t available = 0;
    while (meminfo >> key >> kib && std::getline(meminfo, unit)) {
        if (key == "MemAvailable:") {
            available = kib * 1024;
        }
    }
    const int64_t limited = cgroup_available();
    return limited >= 0 && (available == 0 || limited < available) ? limited : available;
}

int32_t pykvq_system_physical_cores() {
    cpu_set_t allowed;
    CPU_ZERO(&allowed);
    if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) {
        return (int32_t) std::max(1u, std::thread::hardware_concurrency());
    }
    std::set<std::string> cores;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
        if (CPU_ISSET(cpu, &allowed)) {
            const std::string path =
                "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list";
            std::ifstream file(path);
            std::string siblings;
            cores.insert(std::getline(file, siblings) ? siblings : std::to_string(cpu));
        }
    }
    return (int32_t) std::max<size_t>(1, cores.size());
}

#else

int64_t pykvq_system_available_memory() {
#    ifdef _WIN32
    MEMORYSTATUSEX status;
    status.dwLength = sizeof(status);
    return GlobalMemoryStatusEx(&status) ? (int64_t) status.ullAvailPhys : 0;
#    else
    return 0;
#    endif
}

int32_t pykvq_system_physical_cores() {
#    ifdef __APPLE__
    int32_t cores = 0;
    size_t size   = sizeof(cores);
    if (sysctlbyname("hw.physicalcpu", &cores, &size, nullptr, 0) == 0 && cores > 0) {
        return cores;
    }
#    endif
    return (int32_t) std::max(1u, std::thread::hardware_concurrency());
}

#endif
