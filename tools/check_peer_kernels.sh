#!/bin/sh
# check_peer_kernels.sh IMAGE: fails unless the image has each kernel of csrc/cuda/peer_memory.cc.
image=$1
status=0
for way in one_shot two_shot; do
  for type in i8 i32 i64 f16 bf16 f32 f64; do
    if ! grep -q "jaxcoll_${way}_$type" "$image"; then
      printf '%s has no jaxcoll_%s_%s\n' "$image" "$way" "$type"
      status=1
    fi
  done
done
for kernel in say await; do
  if ! grep -q "jaxcoll_$kernel" "$image"; then
    printf '%s has no jaxcoll_%s\n' "$image" "$kernel"
    status=1
  fi
done
exit $status
