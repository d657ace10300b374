/*
 * Faults between a process and its kernel, for tests of the whole program: loaded with LD_PRELOAD, it stands in front of
 * the calls that read experts and map memory for them. FAULTS names a file with one line, read again at every call, so that
 * a test changes what happens while the process runs:
 *
 *     none            every call goes through
 *     short BYTES     a read gives at most so many bytes, and rubbish behind them
 *     interrupt       every other read of a thread is interrupted
 *     slow MILLIS     a read takes so long in addition
 *     eio PART        reads of files whose path contains PART fail
 *     pilots          reads of the threads that read ahead fail
 *     enomem COUNT    memory for experts is refused after so many mappings
 *
 * Reads of other files than experts' are left alone. READS names a file that gets a line for each read of theirs: offset
 * and path.
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

/* The path of a descriptor that is an experts' file, or nothing. */
static const char *experts_path(int fd, char path[4096]) {
  char name[32];
  snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(name, path, 4095);
  if (length < 0)
    return NULL;
  path[length] = '\0';
  return strstr(path, "/experts/layer-") ? path : NULL;
}

static void note_read(const char *path, off64_t offset) {
  char line[4200];
  const char *notes = getenv("READS");
  int file = notes ? open(notes, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600) : -1;
  if (file < 0)
    return;
  int length = snprintf(line, sizeof line, "%lld %s\n", (long long)offset, path);
  if (write(file, line, (size_t)length) != length)
    abort(); /* A test would take an expert for unread that is not. */
  close(file);
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
  char name[4096];
  const char *path = experts_path(fd, name);
  if (!path)
    return system_pread(fd, buffer, count, offset);
  note_read(path, offset);
  if (is(&fault, "slow"))
    usleep(1000 * (useconds_t)atoi(fault.argument));
  if (is(&fault, "eio") && !strstr(path, fault.argument))
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
