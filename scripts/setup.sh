# Sourced by demo.sh and test.sh: installs what is missing, then sets PYTHON to the environment's.
#
#   FLOWRL_VENV    folder of the virtual environment (default: .venv in the project)
#   FLOWRL_EXTRAS  extras to install (default: dev, what developers need; empty for none)

FLOWRL_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
FLOWRL_VENV="${FLOWRL_VENV:-$FLOWRL_ROOT/.venv}"
FLOWRL_EXTRAS="${FLOWRL_EXTRAS-dev}"

say() { printf '%s\n' "$*" >&2; }

as_root() {
  if [ "$(id -u)" -eq 0 ]; then
    "$@"
  elif command -v sudo >/dev/null; then
    sudo "$@"
  else
    say "flowrl: this needs root: $*"
    return 1
  fi
}

# apt_install PACKAGE REASON
apt_install() {
  if ! command -v apt-get >/dev/null; then
    say "flowrl: please install $1 with your package manager: $2"
    return 1
  fi
  say "flowrl: installing the system's package $1 with apt-get, as root: $2"
  as_root env DEBIAN_FRONTEND=noninteractive apt-get update -qq
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$1"
}

# offer PROGRAM PACKAGE REASON: what flowrl can do without; it goes on if that cannot be installed.
offer() {
  command -v "$1" >/dev/null || apt_install "$2" "$3" || say "flowrl: going on without $1"
}

find_python() {
  local name
  for name in ${FLOWRL_PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if command -v "$name" >/dev/null &&
      "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$name"
      return
    fi
  done
  say "flowrl: ${FLOWRL_PYTHON:-python3} is no Python 3.11 or newer; name one with FLOWRL_PYTHON=/path/to/python"
  return 1
}

make_environment() {
  local base
  base="$(find_python)"
  if command -v uv >/dev/null; then
    uv venv -q --seed --python "$base" "$FLOWRL_VENV"
    return
  fi
  # Debian ships venv without ensurepip until python3-venv is installed.
  "$base" -c 'import ensurepip' 2>/dev/null ||
    apt_install python3-venv "Python's packages are installed into $FLOWRL_VENV"
  "$base" -m venv "$FLOWRL_VENV"
}

install_package() {
  local what="$FLOWRL_ROOT${FLOWRL_EXTRAS:+[$FLOWRL_EXTRAS]}"
  if command -v uv >/dev/null; then
    uv pip install --python "$FLOWRL_VENV/bin/python" -e "$what" >&2
  else
    "$FLOWRL_VENV/bin/python" -m pip install --disable-pip-version-check -e "$what" >&2
  fi
}

setup() {
  local wanted stamp other
  command -v tmux >/dev/null || apt_install tmux "each skill trains in a tmux session"
  [ -x "$FLOWRL_VENV/bin/python" ] || make_environment
  PYTHON="$FLOWRL_VENV/bin/python"
  stamp="$FLOWRL_VENV/.flowrl-installed"
  wanted="${FLOWRL_EXTRAS:+$FLOWRL_EXTRAS }$FLOWRL_ROOT $(cksum < "$FLOWRL_ROOT/pyproject.toml")"
  case "$(cat "$stamp" 2>/dev/null)" in
    *"$wanted") return ;; # with more extras, perhaps
  esac
  # The clone from which the environment was last installed; a moved one is gone.
  other="$(sed -n 's|^[^/]*\(/.*\) [0-9]* [0-9]*$|\1|p' "$stamp" 2>/dev/null || true)"
  if [ -n "$other" ] && [ "$other" != "$FLOWRL_ROOT" ] && [ -e "$other/pyproject.toml" ]; then
    say "flowrl: $FLOWRL_VENV belongs to $other; name another folder with FLOWRL_VENV"
    return 1
  fi
  say "flowrl: installing Python packages into $FLOWRL_VENV (once, some minutes, about 1 GB)"
  install_package
  printf '%s\n' "$wanted" > "$stamp"
}
