// tests/cpp/fake_between.h: what the fake CUDA and NCCL (fake_cuda.cc) have between processes:
// device memory that others map, and messages.
#pragma once

#include <fcntl.h>     // O_CLOEXEC, O_RDWR, open
#include <sys/mman.h>  // memfd_create, mmap, mprotect
#include <unistd.h>    // close, ftruncate, getpid

#include <cstddef>     // std::byte, std::size_t
#include <cstdlib>     // std::getenv
#include <cstring>     // std::memcpy
#include <filesystem>  // std::filesystem
#include <fstream>     // std::ifstream, std::ofstream
#include <iterator>    // std::istreambuf_iterator
#include <map>         // std::map
#include <mutex>       // std::mutex
#include <optional>    // std::optional
#include <string>      // std::string, std::to_string

#include "cuda/abi.h"

namespace jaxcoll::testing {

/// What cudaMalloc gives: parts of one file without a name, which the process's end frees. Each is
/// zeros, and ends before a page that nobody may touch.
class DeviceMemory {
 public:
  static DeviceMemory& Get() {
    static auto* const memory = new DeviceMemory();
    return *memory;
  }

  /// Null when there is no more.
  void* Allocate(std::size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const std::size_t size = (bytes + kPage - 1) / kPage * kPage;
    if (base_ == nullptr || used_ + size + kPage > kBytes) {
      return nullptr;
    }
    std::byte* const data = base_ + used_;
    mprotect(data + size, kPage, PROT_NONE);
    parts_[data] = {.pid = getpid(), .file = file_, .offset = used_, .bytes = size};
    used_ += size + kPage;
    return data;
  }

  /// Of the start of an allocation.
  bool Describe(const void* data, cuda::IpcHandle& handle) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = parts_.find(data);
    if (found == parts_.end()) {
      return false;
    }
    std::memcpy(handle.bytes.data(), &found->second, sizeof(Part));
    return true;
  }

  /// Whose memory it is.
  static int PidOf(const cuda::IpcHandle& handle) { return PartOf(handle).pid; }

  /// Elsewhere than where its owner has it; null: it can't be mapped.
  static void* Map(const cuda::IpcHandle& handle) {
    const Part part = PartOf(handle);
    const std::string path =
        "/proc/" + std::to_string(part.pid) + "/fd/" + std::to_string(part.file);
    const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (file < 0) {
      return nullptr;
    }
    void* const data = mmap(nullptr, part.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file,
                            static_cast<off_t>(part.offset));
    close(file);
    return data == MAP_FAILED ? nullptr : data;
  }

 private:
  struct Part {
    int pid;
    int file;
    std::size_t offset;
    std::size_t bytes;
  };
  static_assert(sizeof(Part) <= sizeof(cuda::IpcHandle));

  static constexpr std::size_t kPage = 4096;
  static constexpr std::size_t kBytes = std::size_t{1} << 30;  // of which pages exist when used

  DeviceMemory() : file_(memfd_create("fake_cuda", MFD_CLOEXEC)) {
    void* data = MAP_FAILED;
    if (file_ >= 0 && ftruncate(file_, kBytes) == 0) {
      data = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file_, 0);
    }
    base_ = data == MAP_FAILED ? nullptr : static_cast<std::byte*>(data);
  }

  static Part PartOf(const cuda::IpcHandle& handle) {
    Part part{};
    std::memcpy(&part, handle.bytes.data(), sizeof(part));
    return part;
  }

  const int file_;
  std::byte* base_ = nullptr;
  std::mutex mutex_;  // guards the following
  std::size_t used_ = 0;
  std::map<const void*, Part> parts_;
};

/// Messages between the processes of a job: files in a folder of the test's.
class Messages {
 public:
  static bool are_there() { return Folder() != nullptr; }

  static void Put(const std::string& name, const std::string& data) {
    const std::filesystem::path path = std::filesystem::path(Folder()) / name;
    const std::filesystem::path unfinished = path.string() + ".unfinished";
    std::ofstream(unfinished, std::ios::binary) << data;
    std::filesystem::rename(unfinished, path);
  }

  static std::optional<std::string> Get(const std::string& name) {
    std::ifstream file(std::filesystem::path(Folder()) / name, std::ios::binary);
    if (!file) {
      return std::nullopt;
    }
    return std::string(std::istreambuf_iterator<char>(file), {});
  }

 private:
  static const char* Folder() {
    // NOLINTNEXTLINE(concurrency-mt-unsafe): nobody sets variables meanwhile
    static const char* const folder = std::getenv("FAKE_CUDA_FOLDER");
    return folder;
  }
};

}  // namespace jaxcoll::testing
