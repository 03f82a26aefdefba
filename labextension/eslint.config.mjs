import js from '@eslint/js';
import tseslint from 'typescript-eslint';

export default tseslint.config(
  { ignores: ['lib', 'node_modules'] },
  js.configs.recommended,
  {
    files: ['**/*.{ts,mts}'],
    extends: [tseslint.configs.recommendedTypeChecked],
    languageOptions: {
      parserOptions: { project: './tsconfig.test.json', tsconfigRootDir: import.meta.dirname }
    },
    rules: {
      '@typescript-eslint/naming-convention': [
        'error',
        { selector: 'interface', format: ['PascalCase'], prefix: ['I'] }
      ],
      '@typescript-eslint/no-unused-vars': ['error', { args: 'none' }],
      // `Signal.connect` takes a method and its object as separate arguments.
      '@typescript-eslint/unbound-method': 'off',
      curly: 'error',
      eqeqeq: 'error',
      'no-restricted-properties': [
        'error',
        { property: 'innerHTML', message: 'Names and errors may contain markup: use textContent.' },
        { property: 'outerHTML', message: 'Names and errors may contain markup: use textContent.' }
      ]
    }
  },
  {
    files: ['tests/**'],
    rules: {
      '@typescript-eslint/no-explicit-any': 'off',
      '@typescript-eslint/no-unsafe-argument': 'off',
      '@typescript-eslint/no-unsafe-assignment': 'off',
      '@typescript-eslint/no-unsafe-call': 'off',
      '@typescript-eslint/no-unsafe-member-access': 'off',
      '@typescript-eslint/no-unsafe-return': 'off'
    }
  },
  {
    files: ['scripts/**'],
    languageOptions: { globals: { console: 'readonly', process: 'readonly' } }
  }
);
