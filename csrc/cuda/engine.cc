#include "cuda/engine.h"

#include <algorithm>  // std::find, std::max, std::min
#include <array>      // std::array
#include <chrono>     // std::chrono
#include <exception>  // std::exception
#include <thread>     // std::this_thread, std::thread
#include <utility>    // std::move

#include "core/clock.h"

namespace jaxcoll::cuda {
namespace {

constexpr std::size_t kTextBytes = 4096;
constexpr std::size_t kStacksBytes = 65536;
constexpr auto kWatchEvery = std::chrono::milliseconds(50);
constexpr auto kAbortEvery = std::chrono::milliseconds(5);
// NCCL ends a communicator in some milliseconds, unless the device is stuck.
constexpr auto kResetPatience = std::chrono::seconds(5);
constexpr auto kStopPatience = std::chrono::seconds(2);

}  // namespace

Engine& Engine::Get() {
  static auto* const engine = new Engine();  // leaked: programs may run at exit
  return *engine;
}

Status Engine::Open(const LibraryPaths& paths) { return libraries_.Open(paths); }

void Engine::SetDevices(const std::vector<Clique::LocalDevice>& devices) {
  const std::lock_guard<std::mutex> lock(mutex_);
  devices_ = devices;
}

std::set<int> Engine::LocalOf(const std::vector<std::vector<std::int64_t>>& groups) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::set<int> found;
  for (const std::vector<std::int64_t>& group : groups) {
    for (const Clique::LocalDevice& device : devices_) {
      if (std::find(group.begin(), group.end(), device.id) != group.end()) {
        found.insert(device.ordinal);
      }
    }
  }
  return found;
}

std::int64_t Engine::IdOf(int ordinal) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const Clique::LocalDevice& device : devices_) {
    if (device.ordinal == ordinal) {
      return device.id;
    }
  }
  return -1;
}

std::shared_ptr<Clique> Engine::Find(const std::vector<std::int64_t>& devices,
                                     std::optional<std::int64_t> generation) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (generation_ == kBetween || generation.value_or(generation_) != generation_) {
    return nullptr;
  }
  std::shared_ptr<Clique>& clique = cliques_[devices];
  if (clique == nullptr) {
    const Surroundings surroundings{.libraries = &libraries_,
                                    .exchange = &Engine::Exchange,
                                    .notice = &Engine::Notice,
                                    .site_text = &Engine::SiteText,
                                    .start = &Engine::Start,
                                    .traps = traps_.load(),
                                    .peer_image = peer_image_.load(),
                                    .host = host_.load()};
    clique = std::make_shared<Clique>(surroundings, devices, devices_, generation_.load());
  }
  is_watched_ = is_watched_ || Start([this] { Watch(); });
  return clique;
}

std::string Engine::PeerProblem(const std::vector<std::int64_t>& devices) {
  std::vector<int> ordinals;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (const auto found = cliques_.find(devices);
        found != cliques_.end() && found->second->is_ready()) {
      return found->second->peer_problem();
    }
    for (const Clique::LocalDevice& device : devices_) {
      if (std::find(devices.begin(), devices.end(), device.id) != devices.end()) {
        ordinals.push_back(device.ordinal);
      }
    }
  }
  return PeerMemory::Problem(libraries_, peer_image_.load(), ordinals, devices.size());
}

void Engine::Reset() {
  std::map<std::vector<std::int64_t>, std::shared_ptr<Clique>> old;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    old.swap(cliques_);
    generation_ = generation_ == kBetween ? kBetween : generation_ + 1;
  }
  for (const auto& [devices, clique] : old) {
    clique->Fail(Internal("jaxcoll.reset() was called"), /*is_orderly=*/true);
    End(clique);
  }
  const auto deadline = std::chrono::steady_clock::now() + kResetPatience;
  for (const auto& [devices, clique] : old) {
    while (!clique->is_ended() && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(kAbortEvery);
    }
  }
}

void Engine::SetGeneration(std::int64_t generation) {
  const std::lock_guard<std::mutex> lock(mutex_);
  generation_ = generation;
}

void Engine::Stop() {
  stops_.store(true);
  std::unique_lock<std::mutex> lock(threads_mutex_);
  thread_ended_.wait_for(lock, kStopPatience, [&] { return num_threads_ == 0; });
}

void Engine::SetCallbacks(const Callbacks& callbacks) {
  const std::lock_guard<std::mutex> lock(callbacks_mutex_);
  callbacks_ = callbacks;
}

Callbacks Engine::callbacks() const {
  const std::lock_guard<std::mutex> lock(callbacks_mutex_);
  return callbacks_;
}

void Engine::Watch() {
  // Queries must not end what another thread captures.
  int mode = kCaptureModeRelaxed;
  libraries_.runtime.thread_exchange_capture_mode(&mode);
  while (!stops_.load()) {
    std::this_thread::sleep_for(kWatchEvery);
    std::vector<std::shared_ptr<Clique>> cliques;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (const auto& [devices, clique] : cliques_) {
        cliques.push_back(clique);
      }
    }
    for (const auto& clique : cliques) {
      const auto report = callbacks().report;
      if (clique->Look(NowNs(), limits()) && report != nullptr) {
        report(clique->Failure().message.c_str());
      }
      End(clique);  // after the report: who waits for a call that this ends then knows why
    }
  }
}

void Engine::End(const std::shared_ptr<Clique>& clique) {
  if (!clique->ClaimsAbort()) {
    return;
  }
  Abort(clique);
  const std::string text = clique->TellableFailure();
  if (const auto tell = callbacks().tell; tell != nullptr && !text.empty()) {
    tell(clique->devices().data(), clique->devices().size(), clique->generation(), text.c_str());
  }
}

void Engine::Abort(const std::shared_ptr<Clique>& clique) {
  for (std::size_t at = 0; at < clique->num_local(); ++at) {
    // Where there is no thread for it, the communicator stays as it is.
    Start([this, clique, at] {
      for (int tries = 1; !clique->TryAbort(at) && !stops_.load(); ++tries) {
        std::this_thread::sleep_for(std::min(tries * kAbortEvery, kWatchEvery));
      }
    });
  }
}

bool Engine::Start(std::function<void()> work) {
  Engine& engine = Get();
  const std::lock_guard<std::mutex> lock(engine.threads_mutex_);
  try {
    std::thread([&engine, work = std::move(work)] {
      work();
      const std::lock_guard<std::mutex> at_end(engine.threads_mutex_);
      --engine.num_threads_;
      engine.thread_ended_.notify_all();
    }).detach();
  } catch (const std::exception&) {
    return false;
  }
  ++engine.num_threads_;
  return true;
}

Limits Engine::limits() const {
  const std::int64_t timeout_ns = timeout_ns_.load();
  const std::int64_t compile_timeout_ns = compile_timeout_ns_.load();
  const bool has_none = timeout_ns < 0 || compile_timeout_ns < 0;
  return {.timeout_ns = timeout_ns,
          .first_timeout_ns = has_none ? -1 : std::max(timeout_ns, compile_timeout_ns),
          .is_anyone_excused = &Engine::IsAnyoneExcused,
          .gone = &Engine::Gone,
          .absent = &Engine::Absent};
}

std::string Engine::Gone(const std::vector<std::int64_t>& devices, std::int64_t generation) {
  const Callbacks callbacks = Get().callbacks();
  std::array<char, kTextBytes> text{};
  if (callbacks.gone != nullptr) {
    callbacks.gone(devices.data(), devices.size(), generation, text.data(), text.size());
    text.back() = '\0';
  }
  return text.data();
}

std::string Engine::Absent(const std::vector<std::int64_t>& devices, std::uint64_t group,
                           std::uint64_t site, std::int64_t execution) {
  const Callbacks callbacks = Get().callbacks();
  std::vector<char> text(kStacksBytes);
  if (callbacks.absent != nullptr) {
    callbacks.absent(devices.data(), devices.size(), group, site, execution, text.data(),
                     text.size());
    text.back() = '\0';
  }
  return text.data();
}

bool Engine::IsAnyoneExcused() {
  const Callbacks callbacks = Get().callbacks();
  return callbacks.is_anyone_excused != nullptr && callbacks.is_anyone_excused() != 0;
}

std::string Engine::Exchange(const std::vector<std::int64_t>& devices, std::int64_t generation,
                             std::int64_t round, std::span<std::byte> rows) {
  const Callbacks callbacks = Get().callbacks();
  if (callbacks.exchange == nullptr) {
    return "they are in several processes, and jaxcoll.initialize() was not called";
  }
  std::array<char, kTextBytes> text{};
  const int failed =
      callbacks.exchange(devices.data(), devices.size(), generation, round, rows.data(),
                         rows.size() / devices.size(), text.data(), text.size());
  text.back() = '\0';
  return failed == 0 ? "" : std::string(text.data());
}

void Engine::Notice(const std::string& text) {
  if (const Callbacks callbacks = Get().callbacks(); callbacks.notice != nullptr) {
    callbacks.notice(text.c_str());
  }
}

std::string Engine::SiteText(std::uint64_t site) {
  const Callbacks callbacks = Get().callbacks();
  std::array<char, kTextBytes> text{};
  if (callbacks.site_text != nullptr) {
    callbacks.site_text(site, text.data(), text.size());
    text.back() = '\0';
  }
  return text[0] == '\0' ? "site " + std::to_string(site) : std::string(text.data());
}

}  // namespace jaxcoll::cuda
