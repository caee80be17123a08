// host/threads.h: what the system says of the threads of a process.
#pragma once

#include <cstdint>  // std::int64_t

namespace jaxcoll {

/// Whether a thread of process `pid`, other than the calling one, runs, or would if it got its
/// turn, or waits for a disk. True where that can't be told.
bool IsAnyThreadBusy(std::int64_t pid);

/// Whether the calling thread is the process's first one.
bool IsMainThread();

/// Sets how to tell whether the calling thread is one of Python's; this library knows no Python.
void SetPythonThreadTest(bool (*is_python_thread)());
/// Whether it is. What fails there is raised there: XLA runs a program in such a thread only for
/// who started it in this thread, and waits. False before there is a test.
bool IsPythonThread();

}  // namespace jaxcoll
