#!/bin/sh
# check_isa_units.sh NM OBJECT...: fails if a unit of an instruction set defines a weak function.
#
# An inline function or template with external linkage, compiled with -mavx512f, is the same symbol
# as its copy in a portable unit. The linker keeps one of them: perhaps the one that other machines
# cannot run.
nm=$1
shift
status=0
for object; do
  if [ ! -e "$object" ]; then
    printf '%s: no such file\n' "$object"
    exit 2
  fi
  case $object in
    *_avx2.cc.o | *_avx512.cc.o)
      weak=$("$nm" --demangle --defined-only "$object" | grep -E '^[0-9a-f]* W ')
      if [ -n "$weak" ]; then
        printf '%s has weak functions:\n%s\n' "$object" "$weak"
        status=1
      fi
      ;;
  esac
done
exit $status
