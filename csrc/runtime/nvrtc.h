// NVRTC, loaded at first use: CUDA C++ text in, cubin and log out. No toolkit is needed.
#pragma once

#include <string>
#include <vector>

namespace deep_kernels {

struct Header {
  std::string name;  // as the #include names it
  std::string text;
};

enum class Output { cubin, ptx };

struct CompileResult {
  bool ok;
  std::string code;  // cubin, or PTX text
  std::string log;   // compiler's and assembler's
  double seconds;
};

class Nvrtc {
 public:
  // The library of this process: DEEP_KERNELS_NVRTC, else one already loaded, else the folders of
  // installed packages, else the loader's path; one that is too old or no NVRTC is passed over.
  // Throws CompileError with every place it looked.
  static const Nvrtc& get();

  CompileResult compile(const std::string& name, const std::string& source,
                        const std::vector<Header>& headers, const std::vector<std::string>& options,
                        Output output = Output::cubin) const;
  const std::string& version() const { return version_; }  // "13.0"
  const std::string& path() const { return path_; }

 private:
  Nvrtc(void* library, std::string path);
  static Nvrtc load();

  // nvrtc.h in a few lines: results are ints (0 is success), a program is an opaque pointer.
  using Program = void*;
  int (*version_call_)(int*, int*);
  int (*create_)(Program*, const char*, const char*, int, const char* const*, const char* const*);
  int (*destroy_)(Program*);
  int (*compile_)(Program, int, const char* const*);
  int (*cubin_size_)(Program, std::size_t*);
  int (*cubin_)(Program, char*);
  int (*ptx_size_)(Program, std::size_t*);
  int (*ptx_)(Program, char*);
  int (*log_size_)(Program, std::size_t*);
  int (*log_)(Program, char*);
  const char* (*error_string_)(int);
  std::string path_;
  std::string version_;
  bool has_cache_ = false;
};

}  // namespace deep_kernels
