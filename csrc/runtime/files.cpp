#include "runtime/files.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace deep_kernels {

namespace {

constexpr std::size_t kMaxFileBytes = std::size_t{1} << 28;  // no kernel and no header comes near

class Descriptor {
 public:
  Descriptor(const std::filesystem::path& path, int flags)
      : number_(open(path.c_str(), flags | O_CLOEXEC, 0644)) {}
  ~Descriptor() {
    if (number_ >= 0) close(number_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int number() const { return number_; }

 private:
  int number_;
};

int write_all(int descriptor, std::string_view data) {
  while (!data.empty()) {
    const ssize_t count = write(descriptor, data.data(), data.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return errno;
    if (count == 0) return ENOSPC;
    data.remove_prefix(static_cast<std::size_t>(count));
  }
  return 0;
}

}  // namespace

int read_file(const std::filesystem::path& path, std::string& data) {
  const Descriptor file(path, O_RDONLY | O_NONBLOCK);  // a pipe must not wait for its writer
  if (file.number() < 0) return errno;
  struct stat facts{};
  if (fstat(file.number(), &facts) != 0) return errno;
  if (S_ISDIR(facts.st_mode)) return EISDIR;
  if (!S_ISREG(facts.st_mode)) return ENOTSUP;
  if (static_cast<std::size_t>(facts.st_size) > kMaxFileBytes) return EFBIG;
  data.resize(static_cast<std::size_t>(facts.st_size));
  std::size_t filled = 0;
  while (filled < data.size()) {
    const ssize_t count = read(file.number(), data.data() + filled, data.size() - filled);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return errno;
    if (count == 0) break;  // became shorter meanwhile
    filled += static_cast<std::size_t>(count);
  }
  data.resize(filled);
  return 0;
}

int write_new_file(const std::filesystem::path& path,
                   std::initializer_list<std::string_view> parts) {
  const Descriptor file(path, O_WRONLY | O_CREAT | O_EXCL);
  if (file.number() < 0) return errno;
  for (const std::string_view part : parts)
    if (const int fault = write_all(file.number(), part)) return fault;
  return fsync(file.number()) == 0 ? 0 : errno;
}

bool is_folder(const std::filesystem::path& path) {
  struct stat facts{};
  return stat(path.c_str(), &facts) == 0 && S_ISDIR(facts.st_mode);
}

bool is_file_or_link(const std::filesystem::path& path) {
  struct stat facts{};
  return lstat(path.c_str(), &facts) == 0 && (S_ISREG(facts.st_mode) || S_ISLNK(facts.st_mode));
}

int make_folder(const std::filesystem::path& path) {
  if (mkdir(path.c_str(), 0777) == 0) return 0;
  const int reason = errno;
  if (reason == EEXIST) return is_folder(path) ? 0 : ENOTDIR;
  const std::filesystem::path parent = path.parent_path();
  if (reason != ENOENT || parent.empty() || parent == path) return reason;
  if (const int fault = make_folder(parent)) return fault;
  return mkdir(path.c_str(), 0777) == 0 || errno == EEXIST ? 0 : errno;
}

std::vector<std::filesystem::path> list_folder(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> found;
  DIR* stream = opendir(folder.c_str());
  if (stream == nullptr) return found;
  while (const dirent* item = readdir(stream)) {
    const std::string_view name = item->d_name;
    if (name != "." && name != "..") found.push_back(folder / name);
  }
  closedir(stream);
  std::sort(found.begin(), found.end());
  return found;
}

}  // namespace deep_kernels
