"""An op library, built with a C compiler. Its only op returns 10,000 zeros."""

from __future__ import annotations

import subprocess
from pathlib import Path

_SOURCE = r"""
#include <stddef.h>
#include <stdint.h>

/* TensorFlow's headers of these functions are C++. */
typedef void compute_t(void*, void*);
typedef void shape_t(void*, void*);
extern void *TF_NewStatus(void), *TF_NewOpDefinitionBuilder(const char*);
extern void TF_DeleteStatus(void*), TF_DeleteTensor(void*), TF_DeleteShapeHandle(void*);
extern int TF_GetCode(void*);
extern void* TF_AllocateOutput(void*, int, int, int64_t*, int, size_t, void*);
extern void* TF_TensorData(void*);
extern void* TF_ShapeInferenceContextVectorFromSize(void*, size_t);
extern void TF_ShapeInferenceContextSetOutput(void*, int, void*, void*);
extern void TF_OpDefinitionBuilderAddOutput(void*, const char*);
extern void TF_OpDefinitionBuilderSetShapeInferenceFunction(void*, shape_t*);
extern void TF_RegisterOpDefinition(void*, void*);
extern void* TF_NewKernelBuilder(const char*, const char*, void*, compute_t*, void*);
extern void TF_RegisterKernelBuilder(const char*, void*, void*);
enum { OK = 0, INT32 = 3 };

static void compute(void* unused, void* context) {
  int64_t count = 10000;
  void* status = TF_NewStatus();
  void* output = TF_AllocateOutput(context, 0, INT32, &count, 1, count * 4, status);
  if (TF_GetCode(status) == OK) {
    for (int i = 0; i < count; i++) ((int32_t*)TF_TensorData(output))[i] = 0;
    TF_DeleteTensor(output);
  }
  TF_DeleteStatus(status);
}

static void shape(void* context, void* status) {
  void* vector = TF_ShapeInferenceContextVectorFromSize(context, 10000);
  TF_ShapeInferenceContextSetOutput(context, 0, vector, status);
  TF_DeleteShapeHandle(vector);
}

__attribute__((constructor)) static void load(void) {
  void* status = TF_NewStatus();
  void* op = TF_NewOpDefinitionBuilder("TfdTestZeros");
  TF_OpDefinitionBuilderAddOutput(op, "zeros: int32");
  TF_OpDefinitionBuilderSetShapeInferenceFunction(op, shape);
  TF_RegisterOpDefinition(op, status);
  TF_RegisterKernelBuilder(
      "TfdTestZeros", TF_NewKernelBuilder("TfdTestZeros", "CPU", NULL, compute, NULL), status);
  TF_DeleteStatus(status);
}
"""


def build(directory: Path) -> Path:
    """Compile the library, which has the op ``tfd_test_zeros``, and return its path."""
    import tensorflow as tf

    source, library = directory / "zeros.c", directory / "zeros.so"
    source.write_text(_SOURCE)
    command = ["gcc", "-shared", "-fPIC", str(source), "-o", str(library)]
    command += tf.sysconfig.get_link_flags()
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return library
