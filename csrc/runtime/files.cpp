#include "runtime/files.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

namespace deep_kernels {

namespace {

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
  const Descriptor file(path, O_RDONLY);
  if (file.number() < 0) return errno;
  data.clear();
  char buffer[1 << 16];
  for (;;) {
    const ssize_t count = read(file.number(), buffer, sizeof(buffer));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return errno;
    if (count == 0) return 0;
    data.append(buffer, static_cast<std::size_t>(count));
  }
}

int write_new_file(const std::filesystem::path& path,
                   std::initializer_list<std::string_view> parts) {
  const Descriptor file(path, O_WRONLY | O_CREAT | O_EXCL);
  if (file.number() < 0) return errno;
  for (const std::string_view part : parts)
    if (const int fault = write_all(file.number(), part)) return fault;
  return fsync(file.number()) == 0 ? 0 : errno;
}

}  // namespace deep_kernels
