// Computes the kernels of copies, casts, fills, sums and products that a small step of linear layers takes. Their names
// say what they do, and their arguments are laid out as in torch's ATen/native/cuda.
#pragma once
#include <string>
#include <vector>
#include "values.h"
struct Arguments {
  const char *name;
  void **args;
  long x, y, z;  // blocks
  template <class T> T at(int i) const { T t; memcpy(&t, args[i], sizeof t); return t; }
};
static Type type_at(const char *s) {  // of a mangled template argument
  if (*s == 'f') return FLOAT;
  if (*s == 'd') return DOUBLE;
  if (*s == 'i') return INT;
  if (*s == 'l') return LONG;
  if (*s == 'h' || *s == 'b' || *s == 'c') return BYTE;
  if (!strncmp(s, "N3c108BFloat16E", 15)) return BFLOAT;
  if (!strncmp(s, "N3c104HalfE", 11)) return HALF;
  return UNKNOWN;
}
static Type scalar_type(int8_t t) {  // of c10::ScalarType
  switch (t) { case 0: case 1: case 11: return BYTE; case 3: return INT; case 4: return LONG; case 5: return HALF; case 6: return FLOAT; case 7: return DOUBLE; case 15: return BFLOAT; default: return UNKNOWN; }
}
static const char *after(const char *name, const char *what) { const char *p = strstr(name, what); return p ? p + strlen(what) : nullptr; }

// ---- lists of tensors: the arrays of TensorListMetadata

struct Lists {
  const char *meta; int lists, most; long blocks;
  Lists(const void *p, int lists_, long blocks_) : meta((const char *)p), lists(lists_), blocks(blocks_) { static const int n[] = {0, 110, 64, 48, 36, 30}; most = n[lists]; }
  template <class F> void each(F f) const {  // f(addresses of all lists, first element, elements)
    const long *numel = (const long *)(meta + 8 * lists * most);
    const unsigned char *tensor = (const unsigned char *)(numel + most);
    const int *chunk = (const int *)(((uintptr_t)(tensor + 320) + 3) / 4 * 4);
    for (long b = 0; b < blocks; b++) {
      char *addresses[5];
      for (int l = 0; l < lists; l++) memcpy(&addresses[l], meta + 8 * (l * most + tensor[b]), 8);
      long first = (long)chunk[b] * 65536, count = std::min(65536l, numel[tensor[b]] - first);
      if (count > 0) f(addresses, first, count);
    }
  }
};
static bool on_lists(const Arguments &a) {
  const char *depth = after(a.name, "18TensorListMetadataILi");
  if (!depth) return false;
  Lists lists(a.args[0], *depth - '0', a.x);
  if (const char *types = after(a.name, "CopyFunctorI")) {  // from list 0 to list 1
    Type to = type_at(types), from = UNKNOWN;
    const char *second = to == BFLOAT ? types + 15 : to == HALF ? types + 11 : types + 1;
    from = *second == 'S' ? to : type_at(second);
    if (to == UNKNOWN || from == UNKNOWN) return false;
    lists.each([&](char **p, long first, long n) { for (long i = first; i < first + n; i++) store(to, p[1], load(from, p[0], i), i); });
    return true;
  }
  if (const char *type = after(a.name, "BinaryOpListAlphaFunctorI")) {  // x + alpha y
    Type t = type_at(type);
    bool plus = strstr(a.name, "St4plus"), minus = strstr(a.name, "St5minus"), times = strstr(a.name, "St10multiplies");
    if (t == UNKNOWN || !(plus || minus || times)) return false;
    float alpha = a.at<float>(3);
    int out = lists.lists == 3 ? 2 : 0;
    lists.each([&](char **p, long first, long n) {
      for (long i = first; i < first + n; i++) {
        float x = (float)load(t, p[0], i), y = alpha * (float)load(t, p[1], i);
        store(t, p[out], plus ? x + y : minus ? x - y : x * y, i);
      }
    });
    return true;
  }
  if (const char *type = after(a.name, "BinaryOpScalarFunctorI")) {
    Type t = type_at(type);
    bool plus = strstr(a.name, "St4plus"), times = strstr(a.name, "St10multiplies"), by = strstr(a.name, "St7divides");
    if (t == UNKNOWN || !(plus || times || by)) return false;
    float s = a.at<float>(3);
    int out = lists.lists - 1;
    lists.each([&](char **p, long first, long n) {
      for (long i = first; i < first + n; i++) { float x = (float)load(t, p[0], i); store(t, p[out], plus ? x + s : times ? x * s : x / s, i); }
    });
    return true;
  }
  if (strstr(a.name, "UnaryOpFunctorI") && strstr(a.name, "4CopyI")) {
    Type t = type_at(after(a.name, "UnaryOpFunctorI"));
    if (t == UNKNOWN || lists.lists != 2) return false;
    lists.each([&](char **p, long first, long n) { memcpy(p[1] + first * size_of(t), p[0] + first * size_of(t), n * size_of(t)); });
    return true;
  }
  if (const char *type = after(a.name, "ZeroFunctorI")) {
    Type t = type_at(type);
    if (t == UNKNOWN) return false;
    lists.each([&](char **p, long first, long n) { memset(p[0] + first * size_of(t), 0, n * size_of(t)); });
    return true;
  }
  return false;
}

// ---- element by element

// An operation of one or two operands, and the types of the result and of operands as its name says.
struct Operation {
  enum { NONE, COPY, FILL, ADD, MULTIPLY, SCALE } kind = NONE;
  Type to = UNKNOWN, from = UNKNOWN;
  double scalar = 1;
  int operands() const { return kind == FILL ? 0 : kind == ADD || kind == MULTIPLY ? 2 : 1; }
  double operator()(double x, double y) const {
    switch (kind) {
      case FILL: return scalar;
      case ADD: return (float)x + (float)scalar * (float)y;
      case MULTIPLY: return (float)x * (float)y;
      case SCALE: return (float)x * (float)scalar;
      default: return x;
    }
  }
};
static Operation operation(const char *name, const char *functor) {
  Operation o;
  const char *p;
  if ((p = after(name, "11FillFunctorI"))) { o.kind = Operation::FILL; o.to = o.from = type_at(p); if (o.to != UNKNOWN) o.scalar = load(o.to, functor); }
  else if ((p = after(name, "15CUDAFunctor_addI"))) { o.kind = Operation::ADD; o.to = o.from = type_at(p); o.scalar = *(const float *)functor; }
  else if (strstr(name, "bfloat16_copy_kernel_cuda")) { o.kind = Operation::COPY; o.to = BFLOAT; o.from = strstr(name, "ENKUlfE_") || strstr(name, "EUlfE_") || strstr(name, "Ulf") ? FLOAT : strstr(name, "UlN3c104HalfE") ? HALF : UNKNOWN; }
  else if (strstr(name, "float16_copy_kernel_cuda")) { o.kind = Operation::COPY; o.to = HALF; o.from = strstr(name, "Ulf") ? FLOAT : UNKNOWN; }
  else if (strstr(name, "direct_copy_kernel_cuda")) { o.kind = Operation::COPY; for (const char *q = name; (q = strstr(q, "Ul")); q += 2) if (type_at(q + 2) != UNKNOWN) o.to = o.from = type_at(q + 2); }
  else if ((p = after(name, "11MulFunctorI"))) {
    Type inside = type_at(p);
    if ((p = after(name, "AUnaryFunctorI")) || (p = after(name, "BUnaryFunctorI"))) { o.kind = Operation::SCALE; o.scalar = inside == FLOAT ? *(const float *)(functor + 4) : 0; if (inside != FLOAT) o.kind = Operation::NONE; }
    else if ((p = after(name, "13BinaryFunctorI"))) o.kind = Operation::MULTIPLY;
    if (p) o.to = o.from = type_at(p);
  }
  if (o.to == UNKNOWN || o.from == UNKNOWN) o.kind = Operation::NONE;
  return o;
}
static bool elementwise(const Arguments &a) {
  bool vectorized = strstr(a.name, "vectorized_elementwise_kernel"), unrolled = strstr(a.name, "unrolled_elementwise_kernel");
  bool strided = strstr(a.name, "18elementwise_kernelI");
  if (!(vectorized || unrolled || strided)) return false;
  int n = a.at<int>(0);
  if (strided) {  // a closure: dims, {size, 8 bytes} of each, strides in bytes of each and each tensor, addresses, functor, types
    bool casts = !strstr(a.name, "gpu_kernel_impl_nocast");
    Operation o = operation(a.name, "");
    if (o.kind != Operation::COPY) return false;
    const char *c = (const char *)a.args[1];
    int dims = *(const int *)c;
    if (dims < 0 || dims > 25) return false;
    const unsigned *strides = (const unsigned *)(c + 4 + 25 * 12);
    char *data[2]; memcpy(data, c + 4 + 25 * 12 + 25 * 2 * 4, 16);
    Type to = o.to, from = o.from;
    if (casts) { const int8_t *types = (const int8_t *)(c + 4 + 25 * 12 + 25 * 2 * 4 + 16 + 1); to = scalar_type(types[0]); from = scalar_type(types[1]); }
    if (to == UNKNOWN || from == UNKNOWN) return false;
    for (long i = 0; i < n; i++) {
      long left = i, out = 0, in = 0;
      for (int d = 0; d < dims; d++) {
        unsigned size = *(const unsigned *)(c + 4 + 12 * d);
        out += (left % size) * strides[2 * d]; in += (left % size) * strides[2 * d + 1]; left /= size;
      }
      store(to, data[0] + out, load(from, data[1] + in));
    }
    return true;
  }
  Operation o = operation(a.name, (const char *)a.args[1]);
  if (o.kind == Operation::NONE) return false;
  char *data[3]; memcpy(data, a.args[2], 8 * (o.operands() + 1));
  Type to = o.to, from = o.from;
  if (strstr(a.name, "LoadWithCast")) {  // arguments: elements, functor, addresses, two calculators of offsets, loader, storer
    if (o.operands() != 1) return false;
    from = scalar_type(*(const int8_t *)a.args[5]); to = scalar_type(*(const int8_t *)a.args[6]);
    if (to == UNKNOWN || from == UNKNOWN) return false;
  }
  for (long i = 0; i < n; i++) store(to, data[0], o(o.operands() ? load(from, data[1], i) : 0, o.operands() == 2 ? load(from, data[2], i) : 0), i);
  return true;
}

// ---- pieces of tensors, for FSDP

static bool chunk_cat(const Arguments &a) {
  const char *types = after(a.name, "chunk_cat_cuda_kernelI");
  if (!types) return false;
  Type to = type_at(types), from = to;
  const char *second = to == BFLOAT ? types + 15 : types + 1;
  if (*second != 'S' && *second != 'T' && type_at(second) != UNKNOWN) from = type_at(second);
  char **src = a.at<char **>(0); char *dst = a.at<char *>(1);
  const long *tensor_of = a.at<long *>(2), *starts = a.at<long *>(3), *actual = a.at<long *>(5), *padded = a.at<long *>(6);
  long slice = a.at<long>(8), chunk = a.at<long>(9), ratio = a.at<long>(10);
  if (to == UNKNOWN || ratio != (to == FLOAT && from == BFLOAT ? 2 : 1)) return false;
  for (long x = 0; x < a.x; x++) {
    long t = tensor_of[x];
    if (x && tensor_of[x - 1] == t) continue;  // all blocks of a tensor at once
    for (long y = 0; y < a.y; y++)
      for (long z = 0; z < a.z; z++) {
        const char *s = src[t] + z * actual[t] + y * padded[t] / ratio;
        char *d = dst + z * slice + y * chunk + starts[t];
        long bytes = std::min(padded[t] / ratio, std::max(0l, actual[t] - y * padded[t] / ratio));
        memset(d, 0, padded[t]);
        if (ratio == 1) memcpy(d, s, bytes);
        else for (long i = 0; i < bytes / 2; i++) store(FLOAT, d, load(BFLOAT, s, i), i);
      }
  }
  return true;
}
static bool split_copy(const Arguments &a) {
  if (!strstr(a.name, "split_with_sizes_copy_out_contiguous")) return false;
  char **dst = a.at<char **>(0), **src = a.at<char **>(1);
  const long *sizes = a.at<long *>(2), *split_of = a.at<long *>(3);
  long stride = a.at<long>(5), chunks = a.at<long>(6);
  for (long x = 0; x < a.x; x++) {
    long s = split_of[x];
    if (x && split_of[x - 1] == s) continue;
    for (long i = 0; i < chunks; i++) memcpy(dst[s] + i * sizes[s], src[s] + i * stride, sizes[s]);
  }
  return true;
}
static bool cat(const Arguments &a) {
  // output; {addresses[most], offset[most], size[most], elements[most]}; {sizes[4], strides[4]}; dimension; elements or bytes of a step there
  const char *p = strstr(a.name, "CatArrayBatchedCopy") ? strstr(a.name, "EjLi") : nullptr, *type = after(a.name, "OpaqueTypeILj");
  int dims, most, ignored, bytes = 0, together = 1;
  if (!p || !type || sscanf(p, "EjLi%dELi%dE", &dims, &most) != 2) return false;
  long item = atoi(type);
  bool vectorized = strstr(a.name, "CatArrayBatchedCopy_vectorized");
  if (vectorized && sscanf(p, "EjLi%dELi%dELi%dELi%dELi%dE", &dims, &most, &ignored, &bytes, &together) != 5) return false;
  if (!vectorized) bytes = item;
  const char *meta = (const char *)a.args[1], *fields = meta + 8 * most, *contiguous = fields + 12 * most;
  const unsigned *offset = (const unsigned *)fields, *size = offset + most, *numel = size + most;
  const unsigned *sizes = (const unsigned *)a.args[2], *strides = sizes + 4;
  int dimension = a.at<int>(3);
  long step = a.at<unsigned>(4);
  for (long t = 0; t < a.y; t++) {
    if (!vectorized && !contiguous[t]) return false;
    const char *in; memcpy(&in, meta + 8 * t, 8);
    long own = vectorized ? size[t] * step / together : size[t];
    char *out = a.at<char *>(0) + (long)offset[t] * step / together * bytes;
    for (long i = 0; i < numel[t] / together; i++) {
      long left = i, to = 0;
      for (int d = dims - 1; d >= 1; d--) { long n = d == dimension ? own : sizes[d]; to += left % n * strides[d]; left /= n; }
      memcpy(out + (to + left * strides[0]) * bytes, in + i * bytes, bytes);
    }
  }
  return true;
}
static void compute(const Arguments &a) {
  if (strstr(a.name, "spin_kernel")) return;
  if (!(a.args && (on_lists(a) || elementwise(a) || chunk_cat(a) || split_copy(a) || cat(a)))) not_computed(a.name);
}
