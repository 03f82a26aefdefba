/** Version of this package and of the Python package; a test keeps them equal. */
export const VERSION = '0.1.0';
