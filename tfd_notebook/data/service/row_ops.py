"""Ops of TensorFlow by how they treat the rows of a batch."""

from __future__ import annotations

#: Ops that give the same result for a row in any batch.
_ELEMENTWISE_OPS = (
    "Abs Acos Acosh Add AddN AddV2 AdjustHue AdjustSaturation "
    "Angle ApproximateEqual AsString Asin Asinh Atan Atan2 Atanh AvgPool AvgPool3D BesselI0e "
    "BesselI1e Betainc BiasAdd BitwiseAnd BitwiseOr BitwiseXor BroadcastTo Bucketize Cast Ceil "
    "CheckNumerics ClipByValue Complex ComplexAbs Conj Conv2D Conv3D Cos Cosh "
    "DebugGradientIdentity DecodeBase64 DecodeCSV DecodeCompressed DecodePaddedRaw DecodeRaw "
    "DepthToSpace DepthwiseConv2dNative Digamma Dilation2D Div DivNoNan Elu "
    "EncodeBase64 EnsureShape Equal Erf Erfc Erfinv Exp Expm1 ExtractImagePatches "
    "FakeQuantWithMinMaxArgs FakeQuantWithMinMaxVars FakeQuantWithMinMaxVarsPerChannel Floor "
    "FloorDiv FloorMod Greater GreaterEqual Identity Igamma Igammac Imag "
    "ImageProjectiveTransformV2 ImageProjectiveTransformV3 Inv Invert IsFinite IsInf IsNan LRN "
    "LeakyRelu LeftShift Less LessEqual Lgamma Log Log1p LogicalAnd LogicalNot LogicalOr "
    "LookupTableFind LookupTableFindV2 MaxPool MaxPool3D Maximum Minimum Mod Mul MulNoNan Ndtri "
    "Neg NextAfter NotEqual OnesLike ParseExample ParseExampleV2 Polygamma PopulationCount "
    "Pow PreventGradient QuantizeAndDequantizeV2 QuantizeAndDequantizeV4 Real RealDiv Reciprocal "
    "RegexFullMatch RegexReplace Relu Relu6 ResizeArea ResizeBicubic ResizeBilinear "
    "ResizeNearestNeighbor RightShift Rint Round Rsqrt ScaleAndTranslate Select SelectV2 Selu "
    "Sigmoid Sign Sin Sinh Snapshot Softplus Softsign SpaceToDepth Sqrt Square SquaredDifference "
    "StaticRegexFullMatch StaticRegexReplace StopGradient StringJoin StringLength StringLower "
    "StringStrip StringToHashBucket StringToHashBucketFast StringToHashBucketStrong "
    "StringToNumber StringUpper Sub Substr Tan Tanh TruncateDiv TruncateMod UnicodeScript "
    "UnicodeTranscode Xdivy Xlog1py Xlogy ZerosLike Zeta"
)
ELEMENTWISE = frozenset(_ELEMENTWISE_OPS.split())
#: Elementwise ops with results of other sizes.
_RESIZING_OPS = (
    "AvgPool AvgPool3D Conv2D Conv3D DepthToSpace DepthwiseConv2dNative Dilation2D "
    "ExtractImagePatches ImageProjectiveTransformV2 ImageProjectiveTransformV3 MaxPool MaxPool3D "
    "ResizeArea ResizeBicubic ResizeBilinear ResizeNearestNeighbor ScaleAndTranslate SpaceToDepth"
)
RESIZING = frozenset(_RESIZING_OPS.split())
#: Elementwise ops of which only the first input can have rows.
OF_FIRST_INPUT = RESIZING | {"BiasAdd"}
#: Ops that join the elements of the axes that their last input contains.
_OF_AXES_OPS = (
    "All Any ArgMax ArgMin Cumprod Cumsum EuclideanNorm Max Mean Min Prod ReduceJoin ReverseV2 "
    "Roll Sum"
)
OF_AXES = frozenset(_OF_AXES_OPS.split())
#: Ops that join the elements of the last axes, with the number of these axes.
_OF_LAST_OPS = (
    "Bitcast Cross FFT HSVToRGB IFFT IRFFT LogSoftmax LowerBound MatrixDiagV3 RFFT RGBToHSV "
    "Softmax TopKV2 UpperBound"
)
_OF_LAST_TWO_OPS = (
    "Cholesky FFT2D IFFT2D IRFFT2D LogMatrixDeterminant MatrixBandPart MatrixDeterminant "
    "MatrixDiagPartV3 MatrixExponential MatrixInverse MatrixLogarithm MatrixSolve MatrixSquareRoot "
    "MatrixTriangularSolve Qr RFFT2D SelfAdjointEigV2 Svd"
)
OF_LAST_AXES = {
    **dict.fromkeys(_OF_LAST_OPS.split(), 1),
    **dict.fromkeys(_OF_LAST_TWO_OPS.split(), 2),
    "AdjustContrastv2": 3,
}
#: Those of them with results of another rank.
_OF_OTHER_RANK_OPS = (
    "Bitcast LogMatrixDeterminant MatrixDeterminant MatrixDiagPartV3 MatrixDiagV3 SelfAdjointEigV2 "
    "Svd"
)
OF_OTHER_RANK = frozenset(_OF_OTHER_RANK_OPS.split())
#: Ops with results of the same rank and other sizes.
_OF_SAME_RANK_OPS = "ConcatV2 MirrorPad Pad PadV2 Slice Split SplitV Tile Transpose"
OF_SAME_RANK = frozenset(_OF_SAME_RANK_OPS.split())
#: Ops that divide rows into parts, with their outputs of parts.
TO_RAGGED = {
    "RaggedTensorFromVariant": ("output_dense_values",),
    "StringSplit": ("values",),
    "StringSplitV2": ("values",),
    "UnicodeDecode": ("char_values",),
    "UnicodeDecodeWithOffsets": ("char_values", "char_to_byte_starts"),
}
#: Ops that join the parts of each row, with the number of the input of parts.
FROM_RAGGED = {"RaggedBincount": 1, "RaggedTensorToTensor": 1, "RaggedTensorToVariant": -1}
#: Ops whose result depends on the shape of their input only.
OF_SHAPES = ("OnesLike", "Rank", "Shape", "ShapeN", "Size", "ZerosLike")
