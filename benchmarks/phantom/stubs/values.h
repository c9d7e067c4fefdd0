// Numbers, where $PHANTOM_COMPUTE is set: what it takes to compute small kernels at the time of their launch.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include "log.h"
static bool computes() { static bool on = getenv("PHANTOM_COMPUTE") != nullptr; return on; }
static void not_computed(const char *what) { phantom_log("not computed", 0, what, 0, 0, 0, 0, 0); }
enum Type { FLOAT, HALF, BFLOAT, DOUBLE, INT, LONG, BYTE, UNKNOWN };
static long size_of(Type t) { static const long sizes[] = {4, 2, 2, 8, 4, 8, 1, 1}; return sizes[t]; }
static float half_to_float(uint16_t h) { _Float16 f; memcpy(&f, &h, 2); return (float)f; }
static uint16_t float_to_half(float x) { _Float16 f = (_Float16)x; uint16_t h; memcpy(&h, &f, 2); return h; }
static float bfloat_to_float(uint16_t b) { uint32_t u = (uint32_t)b << 16; float f; memcpy(&f, &u, 4); return f; }
static uint16_t float_to_bfloat(float f) {  // to the nearest, and to even
  uint32_t u; memcpy(&u, &f, 4);
  if ((u & 0x7fffffff) > 0x7f800000) return 0x7fc0;
  return (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
static double load(Type t, const void *p, long i = 0) {
  switch (t) {
    case FLOAT: return ((const float *)p)[i];
    case HALF: return half_to_float(((const uint16_t *)p)[i]);
    case BFLOAT: return bfloat_to_float(((const uint16_t *)p)[i]);
    case DOUBLE: return ((const double *)p)[i];
    case INT: return ((const int *)p)[i];
    case LONG: return (double)((const long *)p)[i];
    default: return ((const unsigned char *)p)[i];
  }
}
static void store(Type t, void *p, double x, long i = 0) {
  switch (t) {
    case FLOAT: ((float *)p)[i] = (float)x; break;
    case HALF: ((uint16_t *)p)[i] = float_to_half((float)x); break;
    case BFLOAT: ((uint16_t *)p)[i] = float_to_bfloat((float)x); break;
    case DOUBLE: ((double *)p)[i] = x; break;
    case INT: ((int *)p)[i] = (int)x; break;
    case LONG: ((long *)p)[i] = (long)x; break;
    default: ((unsigned char *)p)[i] = (unsigned char)x;
  }
}
