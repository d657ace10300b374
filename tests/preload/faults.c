/*
 * Faults between a process and its kernel, for tests of the whole program: loaded with LD_PRELOAD, it stands in front of
 * the calls that read experts and map memory for them. FAULTS names a file with one line, read again at every call, so that
 * a test changes what happens while the process runs:
 *
 *     none            every call goes through
 *     short BYTES     a read gives at most so many bytes, and rubbish behind them
 *     interrupt       every other read of a thread is interrupted
 *     eio PART        reads of files whose path contains PART fail
 *     pilots          reads of the threads that read ahead fail
 *     enomem COUNT    memory for experts is refused after so many mappings
 *
 * Reads of other files than experts' are left alone.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* Slots are mapped in steps of a huge page, plus one; what else this process maps by this call is smaller. */
#define SLOTS_LEAST (2UL << 20)

struct fault {
  char mode[16];
  char argument[64];
};

static int is(const struct fault *fault, const char *mode) { return !strcmp(fault->mode, mode); }

static struct fault fault_now(void) {
  struct fault fault = {"none", ""};
  char line[96];
  const char *path = getenv("FAULTS");
  int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (file < 0)
    return fault;
  ssize_t length = read(file, line, sizeof line - 1);
  close(file);
  if (length > 0) {
    line[length] = '\0';
    sscanf(line, "%15s %63s", fault.mode, fault.argument);
  }
  return fault;
}

/* Whether a descriptor is an experts' file whose path contains a part. */
static int is_experts(int fd, const char *part) {
  char name[32], path[4096];
  snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(name, path, sizeof path - 1);
  if (length < 0)
    return 0;
  path[length] = '\0';
  return strstr(path, "/experts/layer-") && strstr(path, part);
}

static int is_pilot(void) {
  char name[16] = "";
  pthread_getname_np(pthread_self(), name, sizeof name);
  return strstr(name, "-pilot-") != NULL;
}

ssize_t pread64(int fd, void *buffer, size_t count, off64_t offset) {
  static _Thread_local unsigned calls;
  ssize_t (*system_pread)(int, void *, size_t, off64_t) =
      (ssize_t (*)(int, void *, size_t, off64_t))dlsym(RTLD_NEXT, "pread64");
  struct fault fault = fault_now();
  if (!is_experts(fd, is(&fault, "eio") ? fault.argument : ""))
    return system_pread(fd, buffer, count, offset);
  if (is(&fault, "eio") || (is(&fault, "pilots") && is_pilot())) {
    errno = EIO;
    return -1;
  }
  if (is(&fault, "interrupt") && calls++ % 2 == 0) {
    errno = EINTR;
    return -1;
  }
  ssize_t got = system_pread(fd, buffer, count, offset);
  ssize_t most = atol(fault.argument);
  if (is(&fault, "short") && got > most) {
    memset((char *)buffer + most, 0xee, (size_t)(got - most));
    got = most;
  }
  return got;
}

void *mmap64(void *address, size_t length, int protection, int flags, int fd, off64_t offset) {
  static atomic_long granted;
  void *(*system_mmap)(void *, size_t, int, int, int, off64_t) =
      (void *(*)(void *, size_t, int, int, int, off64_t))dlsym(RTLD_NEXT, "mmap64");
  if (fd == -1 && length > SLOTS_LEAST) {
    struct fault fault = fault_now();
    if (is(&fault, "enomem") && atomic_fetch_add(&granted, 1) >= atol(fault.argument)) {
      errno = ENOMEM;
      return MAP_FAILED;
    }
  }
  return system_mmap(address, length, protection, flags, fd, offset);
}

ssize_t pread(int fd, void *buffer, size_t count, off_t offset) { return pread64(fd, buffer, count, offset); }

void *mmap(void *address, size_t length, int protection, int flags, int fd, off_t offset) {
  return mmap64(address, length, protection, flags, fd, offset);
}
