// host/recorder_door.h: the flight recorder for an engine that is a library of its own, as C
// functions: csrc/cuda/recording.h has the same, and is given their addresses.
#pragma once

#include <cstddef>  // std::size_t
#include <cstdint>  // std::int64_t, std::uint64_t

namespace jaxcoll {

/// Begins an entry of a device of any number, which only knows of its own arrival. Returns what
/// names the entry.
std::uint64_t RecordBegin(std::int64_t device, std::uint64_t site, std::uint64_t group,
                          std::int64_t rank, std::int64_t execution, std::int64_t run,
                          std::int64_t iteration, std::int64_t now_ns);
/// The call has ended, or failed (1), if the recorder still has it.
void RecordEnd(std::int64_t device, std::uint64_t sequence, std::int64_t now_ns, int has_failed);
/// Writes what a device does, and did last, to `text`, a buffer of `bytes`; see LastCallText.
void WriteLastCall(std::int64_t device, char* text, std::size_t bytes);
/// Writes what errors say of dumps; see DumpText.
void WriteDumpText(char* text, std::size_t bytes);

}  // namespace jaxcoll
