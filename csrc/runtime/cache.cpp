#include "runtime/cache.h"

#include <fmt/format.h>
#include <sys/stat.h>
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
  std::uint8_t digest[32];  // SHA-256 of the whole file with zeros here
};
constexpr char kMagic[8] = {'D', 'K', 'C', 'A', 'C', 'H', 'E', '\n'};
constexpr const char* kTemporaryPrefix = ".writing-";
constexpr const char* kMovedPrefix = ".moved-";

void warn_once_unusable(const std::filesystem::path& folder, const std::string& reason) {
  static std::atomic<bool> warned = false;
  if (warned.exchange(true)) return;
  warn(fmt::format("deep_kernels: the cache folder {} {}: kernels are kept in memory only",
                   folder.string(), reason));
}

// A name in the folder of `file` that no other process and no other call uses.
std::filesystem::path private_name(const std::filesystem::path& file, const char* prefix) {
  return file.parent_path() / fmt::format("{}{}-{:08x}-{}", prefix, getpid(),
                                          std::random_device{}(), file.filename().string());
}

// "dk_<op>_<target>_<key>" of a file's name; nothing if it is not the name of an entry.
std::string entry_of(const std::filesystem::path& file) {
  const std::string name = file.filename().string();
  const std::size_t end = name.rfind("-nvrtc");
  return end == std::string::npos ? "" : name.substr(0, end);
}

bool is_entry_name(std::string_view name) {
  return name.starts_with("dk_") && name.ends_with(kSuffix) &&
         name.find("-nvrtc") != std::string_view::npos;
}

// Takes the digits off the front; false if there are none.
bool skip_digits(std::string_view& text, const char* digits) {
  const std::size_t end = std::min(text.find_first_not_of(digits), text.size());
  text.remove_prefix(end);
  return end > 0;
}

bool skip(std::string_view& text, std::string_view expected) {
  if (!text.starts_with(expected)) return false;
  text.remove_prefix(expected.size());
  return true;
}

// Whether private_name() made it of an entry's name.
bool is_half_written(std::string_view name) {
  return skip(name, kTemporaryPrefix) && skip_digits(name, "0123456789") && skip(name, "-") &&
         skip_digits(name, "0123456789abcdef") && skip(name, "-") && is_entry_name(name);
}

std::string_view bytes_of(const FileHeader& header) {
  return {reinterpret_cast<const char*>(&header), sizeof(header)};
}

std::array<std::uint8_t, 32> digest_of(FileHeader header, std::string_view payload) {
  std::memset(header.digest, 0, sizeof(header.digest));
  std::string whole(bytes_of(header));
  whole += payload;
  return sha256(whole);
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
  const auto digest = digest_of(header, payload);
  std::memcpy(header.digest, digest.data(), digest.size());
  if (const int fault = write_new_file(temporary, {bytes_of(header), payload})) return fault;
  if (rename(temporary.c_str(), file.c_str()) == 0) return 0;
  if (errno != EISDIR) return errno;
  if (rename(file.c_str(), private_name(file, kMovedPrefix).c_str()) != 0) return errno;
  return rename(temporary.c_str(), file.c_str()) == 0 ? 0 : errno;
}

// Returns an errno value.
int make_folder_and_write(const std::filesystem::path& file, const Entry& entry) {
  if (const int fault = make_folder(file.parent_path())) return fault;
  const std::filesystem::path temporary = private_name(file, kTemporaryPrefix);
  const int fault = write_and_rename(temporary, file, entry);
  if (fault != 0) unlink(temporary.c_str());
  return fault;
}

// Why the folder is not this user's alone, or nothing.
std::string why_not_private(const std::filesystem::path& folder) {
  if (mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) return std::strerror(errno);
  struct stat facts{};
  if (lstat(folder.c_str(), &facts) != 0) return std::strerror(errno);
  if (!S_ISDIR(facts.st_mode)) return "it is not a folder";
  if (facts.st_uid != geteuid()) return "it belongs to another user";
  if ((facts.st_mode & 0022) != 0) return "other users may write to it";
  return "";
}

}  // namespace

std::string file_prefix(const std::string& entry) { return entry + "-nvrtc"; }

std::string file_name(const std::string& entry, const std::string& nvrtc_version) {
  return file_prefix(entry) + nvrtc_version + kSuffix;
}

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
  const auto digest = digest_of(header, payload);
  if (std::memcmp(digest.data(), header.digest, digest.size()) != 0)
    return {std::nullopt, "content does not match its digest"};
  Entry entry;
  entry.about = payload.substr(0, header.about_bytes);
  entry.source = payload.substr(header.about_bytes, header.source_bytes);
  entry.cubin = payload.substr(header.about_bytes + header.source_bytes);
  const std::string expected_entry = entry_of(path);
  if (!entry.about.starts_with(fmt::format("{{\"entry\": \"{}\"", expected_entry)))
    return {std::nullopt, "holds another kernel than its name says"};
  return {std::move(entry), ""};
}

bool save(const std::filesystem::path& file, const Entry& entry) {
  int fault = make_folder_and_write(file, entry);
  // Somebody removed the folder meanwhile.
  if (fault == ENOENT) fault = make_folder_and_write(file, entry);
  if (fault == 0) return true;
  warn_once_unusable(file.parent_path(),
                     fmt::format("cannot be written ({})", std::strerror(fault)));
  return false;
}

bool make_private(const std::filesystem::path& folder) {
  const std::string reason = why_not_private(folder);
  if (reason.empty()) return true;
  warn_once_unusable(folder, fmt::format("cannot be trusted ({})", reason));
  return false;
}

std::vector<std::filesystem::path> files(const std::filesystem::path& folder,
                                         const std::string& prefix) {
  std::vector<std::filesystem::path> found;
  for (const std::filesystem::path& file : list_folder(folder)) {
    const std::string name = file.filename().string();
    if (name.starts_with(prefix) && name.ends_with(kSuffix) && !name.starts_with("."))
      found.push_back(file);
  }
  return found;
}

std::vector<std::filesystem::path> removable(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> found;
  for (const std::filesystem::path& file : list_folder(folder)) {
    const std::string name = file.filename().string();
    if ((is_entry_name(name) || is_half_written(name)) && is_file_or_link(file))
      found.push_back(file);
  }
  return found;
}

int clear(const std::filesystem::path& folder) {
  int removed = 0;
  for (const std::filesystem::path& file : removable(folder))
    removed += unlink(file.c_str()) == 0 ? 1 : 0;
  return removed;
}

}  // namespace deep_kernels::cache
