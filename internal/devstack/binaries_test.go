package devstack

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha512"
	"encoding/base64"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestFindPostgres(t *testing.T) {
	t.Parallel()

	t.Run("TakesTheConfiguredFolderOrFails", func(t *testing.T) {
		t.Parallel()

		dir := programs(t, "19.1")
		got, err := FindPostgres(t.Context(), BinariesConfig{BinDir: dir})
		require.NoError(t, err)
		require.Equal(t, dir, got)

		_, err = FindPostgres(t.Context(), BinariesConfig{BinDir: t.TempDir()})
		require.ErrorContains(t, err, "ONCELEDGER_POSTGRES_BIN")
		_, err = FindPostgres(t.Context(), BinariesConfig{BinDir: programs(t, "17.6")})
		require.ErrorContains(t, err, "is Postgres 17.6, needed is 18 or later")
	})

	t.Run("PassesOverAnOldInstalledOne", func(t *testing.T) {
		t.Parallel()

		old, good := programs(t, "15.18 (Debian 15.18-0+deb12u1)"), programs(t, "18.4")
		got, err := findPostgres(t.Context(), BinariesConfig{}, []string{old, good}, "")
		require.NoError(t, err)
		require.Equal(t, good, got)
	})
}

func TestFindPostgresSaysWhatWasTriedAndWhatToDo(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", t.TempDir())

	_, err := findPostgres(t.Context(), BinariesConfig{}, []string{programs(t, "15.18")}, "")
	for _, part := range []string{
		"is Postgres 15.18", "npm is not installed", // tried
		"install npm", "ONCELEDGER_POSTGRES_BIN", "DATABASE_URL", // to do
	} {
		require.ErrorContains(t, err, part)
	}
}

func TestCacheDirWithoutHome(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", "")
	t.Setenv("HOME", "")
	fallback := t.TempDir()
	dir, err := CacheDir(fallback)
	require.NoError(t, err)
	require.Equal(t, filepath.Join(fallback, "cache"), dir)

	t.Setenv("HOME", "/proc/nonexistent") // there is one, and it cannot be used
	dir, err = CacheDir(fallback)
	require.NoError(t, err)
	require.Equal(t, filepath.Join(fallback, "cache"), dir)

	_, err = CacheDir("")
	require.ErrorContains(t, err, "find a cache folder")
}

func TestFetch(t *testing.T) {
	t.Parallel()

	good := archive(t, map[string]string{
		"package/native/bin/postgres":            "#!/bin/sh\n",
		"package/native/lib/libpq.so.5.18":       "library",
		"package/native/share/a.conf":            "text",
		"package/native/pg-symlinks.json":        `[{"source":"native/lib/libpq.so.5.18","target":"native/lib/libpq.so.5"}]`,
		"package/native/lib/postgresql/empty.so": "",
	})
	pinned := func(content []byte) npmPackage {
		digest := sha512.Sum512(content)
		return npmPackage{
			name: "some-package", version: "1", size: int64(len(content)),
			integrity: "sha512-" + base64.StdEncoding.EncodeToString(digest[:]),
		}
	}

	t.Run("UnpacksLinksAndRenames", func(t *testing.T) {
		t.Parallel()

		target := filepath.Join(t.TempDir(), "postgres")
		interrupted := target + ".tmp-1"
		require.NoError(t, os.Mkdir(interrupted, 0o755))

		require.NoError(t, pinned(good).fetch(t.Context(), npm(t, good), target, t.Logf))
		library, err := os.ReadFile(filepath.Join(target, "native/lib/libpq.so.5"))
		require.NoError(t, err)
		require.Equal(t, "library", string(library))
		info, err := os.Stat(filepath.Join(target, "native/bin/postgres"))
		require.NoError(t, err)
		require.Equal(t, os.FileMode(0o755), info.Mode().Perm())
		require.NoDirExists(t, interrupted)
	})

	refused := []struct {
		name      string
		delivered []byte
		pkg       npmPackage
		says      string
	}{
		{"Truncated", good[:len(good)-9], pinned(good), "bytes, expected"},
		{"WithAWrongDigest", append(bytes.Clone(good[:len(good)-1]), good[len(good)-1]^1), pinned(good), "has digest"},
		{"ThatPointsOutside", archive(t, map[string]string{"package/../../evil": "x"}), npmPackage{}, "points outside"},
	}
	for _, test := range refused {
		t.Run("RefusesAnArchive"+test.name, func(t *testing.T) {
			t.Parallel()

			pkg := test.pkg
			if pkg.name == "" {
				pkg = pinned(test.delivered)
			}
			dir := t.TempDir()
			target := filepath.Join(dir, "postgres")
			require.ErrorContains(t, pkg.fetch(t.Context(), npm(t, test.delivered), target, t.Logf), test.says)
			left, err := os.ReadDir(dir)
			require.NoError(t, err)
			require.Empty(t, left, "nothing is kept")
		})
	}

	t.Run("SaysWhatNpmSaid", func(t *testing.T) {
		t.Parallel()

		failing := filepath.Join(t.TempDir(), "npm")
		require.NoError(t, os.WriteFile(failing, []byte("#!/bin/sh\necho no network >&2\nexit 1\n"), 0o755))
		err := pinned(good).fetch(t.Context(), failing, filepath.Join(t.TempDir(), "postgres"), t.Logf)
		require.ErrorContains(t, err, "npm pack some-package@1")
		require.ErrorContains(t, err, "no network")
	})
}

// programs is a folder with a postgres that answers with this version.
func programs(t *testing.T, version string) string {
	t.Helper()
	dir := t.TempDir()
	script := fmt.Sprintf("#!/bin/sh\necho 'postgres (PostgreSQL) %s'\n", version)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "postgres"), []byte(script), 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "initdb"), []byte(script), 0o755))
	return dir
}

// npm is a program that delivers this archive.
func npm(t *testing.T, content []byte) string {
	t.Helper()
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "content"), content, 0o644))
	path := filepath.Join(dir, "npm")
	script := fmt.Sprintf("#!/bin/sh\ncp %s/content ./some-package-1.tgz\n", dir)
	require.NoError(t, os.WriteFile(path, []byte(script), 0o755))
	return path
}

func archive(t *testing.T, files map[string]string) []byte {
	t.Helper()
	var buffer bytes.Buffer
	zipped := gzip.NewWriter(&buffer)
	entries := tar.NewWriter(zipped)
	for name, content := range files {
		require.NoError(t, entries.WriteHeader(&tar.Header{Name: name, Size: int64(len(content)), Mode: 0o644, Typeflag: tar.TypeReg}))
		_, err := entries.Write([]byte(content))
		require.NoError(t, err)
	}
	require.NoError(t, entries.Close())
	require.NoError(t, zipped.Close())
	return buffer.Bytes()
}
