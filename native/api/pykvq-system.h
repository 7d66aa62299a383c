// pykvq-system.h: what the operating system says of this machine.

#pragma once

#include <cstdint>

// Bytes of RAM this process could still take (the lower of the machine's and its control group's), 0 if unknown.
int64_t pykvq_system_available_memory();

// Physical cores this process may run on, at least 1. Two hardware threads of one core count once: attention and
// matrix products share the core's vector units.
int32_t pykvq_system_physical_cores();
