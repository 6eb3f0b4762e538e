/* An NVRTC that hands everything to a real one and can be slow, noted, and of another version. It
 * holds one lock while it compiles, as the real one does in parts: a child forked meanwhile could
 * never take it. SHIM_NVRTC    the real library SHIM_VERSION  "12.9": what nvrtcVersion says
 *   SHIM_SLEEP    milliseconds that a compilation takes longer
 *   SHIM_LOG      a file that gets a line "begin <ns>" and "end <ns>" per compilation
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void* real(const char* name) {
  static void* library;
  if (library == NULL) library = dlopen(getenv("SHIM_NVRTC"), RTLD_NOW | RTLD_LOCAL);
  void* call = library ? dlsym(library, name) : NULL;
  if (call == NULL) {
    fprintf(stderr, "shim: no %s in %s\n", name, getenv("SHIM_NVRTC"));
    abort();
  }
  return call;
}

static void note(const char* what) {
  const char* path = getenv("SHIM_LOG");
  if (path == NULL) return;
  struct timespec now;
  char line[64];
  clock_gettime(CLOCK_MONOTONIC, &now);
  const int size =
      snprintf(line, sizeof(line), "%s %lld\n", what, now.tv_sec * 1000000000ll + now.tv_nsec);
  const int file = open(path, O_WRONLY | O_CREAT | O_APPEND, 0644);
  if (write(file, line, (size_t)size) != size) abort();
  close(file);
}

int nvrtcVersion(int* major, int* minor) {
  const char* version = getenv("SHIM_VERSION");
  if (version != NULL) return sscanf(version, "%d.%d", major, minor) == 2 ? 0 : 1;
  return ((int (*)(int*, int*))real("nvrtcVersion"))(major, minor);
}

int nvrtcCompileProgram(void* program, int count, const char* const* options) {
  const char* sleep_ms = getenv("SHIM_SLEEP");
  const int slow = sleep_ms ? atoi(sleep_ms) : 0;
  note("begin");
  if (getenv("SHIM_LOCK") != NULL) pthread_mutex_lock(&lock);
  usleep((useconds_t)slow * 1000);
  const int result = ((int (*)(void*, int, const char* const*))real("nvrtcCompileProgram"))(
      program, count, options);
  if (getenv("SHIM_LOCK") != NULL) pthread_mutex_unlock(&lock);
  note("end");
  return result;
}

int nvrtcCreateProgram(void** program, const char* source, const char* name, int count,
                       const char* const* headers, const char* const* names) {
  return ((int (*)(void**, const char*, const char*, int, const char* const*,
                   const char* const*))real("nvrtcCreateProgram"))(program, source, name, count,
                                                                   headers, names);
}
int nvrtcDestroyProgram(void** program) {
  return ((int (*)(void**))real("nvrtcDestroyProgram"))(program);
}
const char* nvrtcGetErrorString(int result) {
  return ((const char* (*)(int))real("nvrtcGetErrorString"))(result);
}

#define GETTER(name, type)                                        \
  int name(void* program, type* result) {                         \
    return ((int (*)(void*, type*))real(#name))(program, result); \
  }
GETTER(nvrtcGetCUBINSize, size_t)
GETTER(nvrtcGetCUBIN, char)
GETTER(nvrtcGetPTXSize, size_t)
GETTER(nvrtcGetPTX, char)
GETTER(nvrtcGetProgramLogSize, size_t)
GETTER(nvrtcGetProgramLog, char)
