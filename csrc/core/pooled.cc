#include "core/pooled.h"

#include <cstdint>  // std::int64_t, std::uintptr_t
#include <cstdlib>  // std::aligned_alloc, std::free
#include <mutex>    // std::mutex
#include <new>      // std::bad_alloc, placement new

#include "core/align.h"

namespace jaxcoll {

#ifdef __SANITIZE_ADDRESS__  // which looks at each object

void* Pooled::Allocate(std::size_t bytes) { return ::operator new(bytes); }
void Pooled::Free(void* object) { ::operator delete(object); }

#else

namespace {

// Of a chunk, and where chunks begin.
constexpr std::size_t kChunkBytes = std::size_t{64} * 1024;

// Freed with the last of its objects. One that has more than a chunk to itself has no other.
struct alignas(kCacheLine) Chunk {
  std::int64_t num_objects = 0;
  std::size_t used = sizeof(Chunk);
};

struct Pool {
  std::mutex mutex;
  Chunk* open = nullptr;  // whose rest is free

  static Pool& Get() {
    static Pool* const pool = new Pool();  // leaked: call sites may go at exit
    return *pool;
  }
};

Chunk* NewChunk(std::size_t bytes) {
  void* const memory = std::aligned_alloc(kChunkBytes, RoundedUp(bytes, kChunkBytes));
  if (memory == nullptr) {
    throw std::bad_alloc();
  }
  return new (memory) Chunk();
}

Chunk* ChunkOf(void* object) {
  const auto address = reinterpret_cast<std::uintptr_t>(object);
  return reinterpret_cast<Chunk*>(static_cast<std::byte*>(object) - address % kChunkBytes);
}

}  // namespace

void* Pooled::Allocate(std::size_t bytes) {
  bytes = RoundedUp(bytes, kCacheLine);
  Pool& pool = Pool::Get();
  const std::lock_guard<std::mutex> lock(pool.mutex);
  Chunk* chunk = pool.open;
  if (chunk == nullptr || chunk->used + bytes > kChunkBytes) {
    chunk = NewChunk(sizeof(Chunk) + bytes);
    if (sizeof(Chunk) + bytes <= kChunkBytes) {
      if (pool.open != nullptr && pool.open->num_objects == 0) {
        std::free(pool.open);
      }
      pool.open = chunk;
    }
  }
  void* const object = reinterpret_cast<std::byte*>(chunk) + chunk->used;
  chunk->used += bytes;
  ++chunk->num_objects;
  return object;
}

void Pooled::Free(void* object) {
  if (object == nullptr) {
    return;
  }
  Pool& pool = Pool::Get();
  const std::lock_guard<std::mutex> lock(pool.mutex);
  Chunk* const chunk = ChunkOf(object);
  if (--chunk->num_objects > 0) {
    return;
  }
  if (chunk == pool.open) {
    chunk->used = sizeof(Chunk);
  } else {
    std::free(chunk);
  }
}

#endif

}  // namespace jaxcoll
