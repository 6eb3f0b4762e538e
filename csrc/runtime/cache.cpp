#include "runtime/cache.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <random>

#include "runtime/digest.h"
#include "runtime/errors.h"
#include "runtime/files.h"

namespace deep_kernels::cache {

namespace {

// File: this header, then about, source and cubin without padding. Little-endian.
struct FileHeader {
  char magic[8];
  std::uint32_t schema;
  std::uint32_t about_bytes;
  std::uint32_t source_bytes;
  std::uint32_t cubin_bytes;
  std::uint8_t digest[32];  // SHA-256 of all that follows
};
constexpr char kMagic[8] = {'D', 'K', 'C', 'A', 'C', 'H', 'E', '\n'};
constexpr std::uint32_t kSchema = 1;
constexpr const char* kTemporaryPrefix = ".writing-";

void warn_once_unwritable(const std::filesystem::path& folder, const std::string& reason) {
  static std::atomic<bool> warned = false;
  if (warned.exchange(true)) return;
  warn(fmt::format(
      "deep_kernels: the cache folder {} cannot be written ({}): kernels are kept in memory only",
      folder.string(), reason));
}

// Returns an errno value.
int write_and_rename(const std::filesystem::path& temporary, const std::filesystem::path& file,
                     const Entry& entry) {
  const std::string payload = entry.about + entry.source + entry.cubin;
  FileHeader header{};
  std::memcpy(header.magic, kMagic, sizeof(kMagic));
  header.schema = kSchema;
  header.about_bytes = static_cast<std::uint32_t>(entry.about.size());
  header.source_bytes = static_cast<std::uint32_t>(entry.source.size());
  header.cubin_bytes = static_cast<std::uint32_t>(entry.cubin.size());
  const auto digest = sha256(payload);
  std::memcpy(header.digest, digest.data(), digest.size());
  const std::string_view head(reinterpret_cast<const char*>(&header), sizeof(header));
  if (const int fault = write_new_file(temporary, {head, payload})) return fault;
  return rename(temporary.c_str(), file.c_str()) == 0 ? 0 : errno;
}

}  // namespace

Loaded load(const std::filesystem::path& path) {
  std::string data;
  if (const int fault = read_file(path, data)) {
    const bool missing = fault == ENOENT || fault == ENOTDIR;
    return {std::nullopt, missing ? "" : std::strerror(fault)};
  }
  FileHeader header;
  if (data.size() < sizeof(header)) return {std::nullopt, "truncated header"};
  std::memcpy(&header, data.data(), sizeof(header));
  if (std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0)
    return {std::nullopt, "not an entry of deep_kernels"};
  if (header.schema != kSchema)
    return {std::nullopt, fmt::format("schema {}, expected {}", header.schema, kSchema)};
  const std::string_view payload = std::string_view(data).substr(sizeof(header));
  const std::uint64_t expected =
      std::uint64_t{header.about_bytes} + header.source_bytes + header.cubin_bytes;
  if (payload.size() != expected)
    return {std::nullopt,
            fmt::format("{} bytes of content, expected {}", payload.size(), expected)};
  const auto digest = sha256(payload);
  if (std::memcmp(digest.data(), header.digest, digest.size()) != 0)
    return {std::nullopt, "content does not match its digest"};
  Entry entry;
  entry.about = payload.substr(0, header.about_bytes);
  entry.source = payload.substr(header.about_bytes, header.source_bytes);
  entry.cubin = payload.substr(header.about_bytes + header.source_bytes);
  return {std::move(entry), ""};
}

bool save(const std::filesystem::path& file, const Entry& entry) {
  const std::filesystem::path folder = file.parent_path();
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) {
    warn_once_unwritable(folder, error.message());
    return false;
  }
  const std::filesystem::path temporary =
      folder / fmt::format("{}{}-{:08x}-{}", kTemporaryPrefix, getpid(), std::random_device{}(),
                           file.filename().string());
  if (const int fault = write_and_rename(temporary, file, entry)) {
    unlink(temporary.c_str());
    warn_once_unwritable(folder, std::strerror(fault));
    return false;
  }
  return true;
}

std::vector<std::filesystem::path> files(const std::filesystem::path& folder,
                                         const std::string& prefix) {
  std::vector<std::filesystem::path> found;
  std::error_code ignored;
  for (const auto& file : std::filesystem::directory_iterator(folder, ignored)) {
    const std::string name = file.path().filename().string();
    if (name.starts_with(prefix) && name.ends_with(kSuffix) && !name.starts_with("."))
      found.push_back(file.path());
  }
  std::sort(found.begin(), found.end());
  return found;
}

int clear(const std::filesystem::path& folder) {
  int removed = 0;
  std::error_code ignored;
  std::vector<std::filesystem::path> doomed = files(folder);
  for (const auto& file : std::filesystem::directory_iterator(folder, ignored))
    if (file.path().filename().string().starts_with(kTemporaryPrefix))
      doomed.push_back(file.path());
  for (const auto& file : doomed) removed += std::filesystem::remove(file, ignored) ? 1 : 0;
  return removed;
}

}  // namespace deep_kernels::cache
