"""Ops of TensorFlow by how they treat the rows of a batch."""

from __future__ import annotations

#: Ops that give the same result for a row in any batch.
_ELEMENTWISE_OPS = (
    "Abs Acos Acosh Add AddN AddV2 AdjustContrast AdjustContrastv2 AdjustHue AdjustSaturation "
    "ApproximateEqual AsString Asin Asinh Atan Atan2 Atanh AvgPool BiasAdd BitwiseAnd BitwiseOr "
    "BitwiseXor BroadcastTo Bucketize Cast Ceil CheckNumerics ClipByValue Complex ComplexAbs Conj "
    "Conv2D Cos Cosh DebugGradientIdentity DecodeBase64 DecodeCSV DecodePaddedRaw DecodeRaw "
    "DepthToSpace DepthwiseConv2dNative Digamma Div DivNoNan Elu "
    "EncodeBase64 EnsureShape Equal Erf Exp Expm1 ExtractImagePatches Floor FloorDiv FloorMod "
    "Greater GreaterEqual HSVToRGB Identity Imag ImageProjectiveTransformV2 "
    "ImageProjectiveTransformV3 Inv Invert IsFinite IsInf IsNan LeakyRelu LeftShift Less LessEqual "
    "Lgamma Log Log1p LogicalAnd LogicalNot LogicalOr LookupTableFind LookupTableFindV2 MaxPool "
    "Maximum Minimum Mod Mul MulNoNan Neg NextAfter NotEqual OnesLike ParseExample ParseExampleV2 "
    "Pow PreventGradient QuantizeAndDequantizeV2 RGBToHSV Real RealDiv Reciprocal RegexFullMatch "
    "RegexReplace Relu Relu6 ResizeArea ResizeBicubic ResizeBilinear ResizeNearestNeighbor "
    "RightShift Rint Round Rsqrt ScaleAndTranslate Select SelectV2 Selu Sigmoid Sign Sin Sinh "
    "Snapshot Softplus Softsign SpaceToDepth Sqrt Square SquaredDifference StaticRegexFullMatch "
    "StaticRegexReplace StopGradient StringJoin StringLength StringLower StringStrip "
    "StringToHashBucket StringToHashBucketFast StringToHashBucketStrong StringToNumber StringUpper "
    "Sub Substr Tan Tanh TruncateDiv TruncateMod UnicodeTranscode Xdivy Xlog1py Xlogy "
    "ZerosLike"
)
ELEMENTWISE = frozenset(_ELEMENTWISE_OPS.split())
#: Elementwise ops with results of other sizes.
_RESIZING_OPS = (
    "AvgPool Conv2D DepthToSpace DepthwiseConv2dNative ExtractImagePatches "
    "ImageProjectiveTransformV2 ImageProjectiveTransformV3 MaxPool ResizeArea ResizeBicubic "
    "ResizeBilinear ResizeNearestNeighbor ScaleAndTranslate SpaceToDepth"
)
RESIZING = frozenset(_RESIZING_OPS.split())
#: Ops that join the elements of the axes that their last input contains.
_OF_AXES_OPS = (
    "All Any ArgMax ArgMin Cumprod Cumsum EuclideanNorm Max Mean Min Prod ReduceJoin ReverseV2 "
    "Roll Sum"
)
OF_AXES = frozenset(_OF_AXES_OPS.split())
#: Ops that join the elements of the last axes, with the number of these axes.
_OF_LAST_OPS = "FFT IFFT IRFFT LogSoftmax MatrixDiagV3 RFFT Softmax TopKV2"
_OF_LAST_TWO_OPS = "Cholesky MatrixBandPart MatrixDiagPartV3 MatrixInverse"
OF_LAST_AXES = dict.fromkeys(_OF_LAST_OPS.split(), 1) | dict.fromkeys(_OF_LAST_TWO_OPS.split(), 2)
#: Ops with results of the same rank and other sizes.
_OF_SAME_RANK_OPS = "ConcatV2 MirrorPad Pad PadV2 Slice Split SplitV Tile Transpose"
OF_SAME_RANK = frozenset(_OF_SAME_RANK_OPS.split())
#: Ops that divide rows into parts, with their outputs of parts.
TO_RAGGED = {"StringSplitV2": ("values",), "RaggedTensorFromVariant": ("output_dense_values",)}
#: Ops that join the parts of each row, with the number of the input of parts.
FROM_RAGGED = {"RaggedTensorToTensor": 1, "RaggedTensorToVariant": -1}
